"""Takes all that a server of processes has imported out of garbage collections of those processes.

Imported last: a process would look at a million objects in each collection, and once more at exit.
"""

import gc

gc.collect()
gc.freeze()
