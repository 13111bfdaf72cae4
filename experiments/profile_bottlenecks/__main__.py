#!/usr/bin/env python3
"""Finds what bounds private training: `python -m experiments.profile_bottlenecks --help`."""

import sys

from experiments.profile_bottlenecks.sweep import main

if __name__ == "__main__":
    sys.exit(main())
