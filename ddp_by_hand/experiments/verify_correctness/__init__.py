"""Every mode beside the reference: `experiments.verify_correctness`."""
