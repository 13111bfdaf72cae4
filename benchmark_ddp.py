#!/usr/bin/env python3
"""Prove, time and profile data-parallel implementations beside PyTorch's own.

python benchmark_ddp.py                         all GPUs, or two CPU processes
torchrun --nproc_per_node=4 benchmark_ddp.py    the same, launched by torchrun
python benchmark_ddp.py --help                  everything else
"""

import sys

from ddp_by_hand.bench.main import main
from ddp_by_hand.lm.runtime import is_first_of_host
from ddp_by_hand.measure.command_line import ending_quietly

if __name__ == "__main__":
    sys.exit(ending_quietly(main, speaks=is_first_of_host)())
