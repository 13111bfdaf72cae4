"""Cost of a private step on one GPU: `python -m experiments.price`."""
