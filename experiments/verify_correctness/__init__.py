"""Every mode beside the reference: `python -m experiments.verify_correctness`."""
