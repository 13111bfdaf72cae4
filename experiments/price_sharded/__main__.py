#!/usr/bin/env python3
"""Measures a private step under FSDP2: `python -m experiments.price_sharded --help`."""

import sys

from experiments.price_sharded.run import main

if __name__ == "__main__":
    sys.exit(main())
