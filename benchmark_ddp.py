#!/usr/bin/env python3
"""Prove, time and profile data-parallel implementations beside PyTorch's own.

python benchmark_ddp.py                         all GPUs, or two CPU processes
torchrun --nproc_per_node=4 benchmark_ddp.py    the same, launched by torchrun
python benchmark_ddp.py --help                  everything else

Where this project is installed, the command is `ddp-benchmark`.
"""

import sys

from ddp_by_hand.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
