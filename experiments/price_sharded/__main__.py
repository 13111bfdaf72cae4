#!/usr/bin/env python3
"""What a private step costs under FSDP2: `python -m experiments.price_sharded --help`.

`run` does it. It is imported late: that takes seconds, in which Ctrl-C is to be as
quiet as later.
"""

import sys
from collections.abc import Sequence

from measure.command_line import ending_quietly, is_alone


@ending_quietly(speaks=is_alone)
def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a rank failed, 2 for bad input, 130 after Ctrl-C."""
    from experiments.price_sharded.run import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
