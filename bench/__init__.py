"""What `benchmark_ddp.py` does: options, correctness gate, timed rounds, profiles, report."""
