"""Step 5, `ddp_copy_engine`: flat buckets that the GPUs' copy engines exchange.

- variant.py: the problem, the idea, and `CopyEngineDDP`; read this first
- exchange.py: the all-reduce of one bucket, as copies and sums
- memory.py: the memory of all buckets
- peer_memory.py: memory that every GPU of a host can read, and flags in it

The sum of what was pulled is a kernel, in ddp/internals/kernels.py.
"""

from ddp.copy_engine.peer_memory import Unavailable
from ddp.copy_engine.variant import CopyEngineDDP

__all__ = ["CopyEngineDDP", "Unavailable"]
