"""Starts the benchmark: `python -m ddp_by_hand.bench`, or `ddp-benchmark`."""

import sys

from ddp_by_hand.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
