#!/usr/bin/env python3
"""Measures private training of a Llama under FSDP2: `python -m experiments.llama_fsdp --help`."""

import sys

from experiments.llama_fsdp.grid import main

if __name__ == "__main__":
    sys.exit(main())
