#!/usr/bin/env python3
"""What private training of a Llama under FSDP2 costs: `python -m experiments.llama_fsdp --help`.

`grid` does it. It is imported late: that takes seconds, in which Ctrl-C is to be as
quiet as later.
"""

import sys
from collections.abc import Sequence

from measure.command_line import ending_quietly, is_alone


@ending_quietly(speaks=is_alone)
def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a cell failed, 2 for bad input, 130 after Ctrl-C."""
    from experiments.llama_fsdp.grid import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
