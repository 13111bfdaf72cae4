"""What a private step costs on one GPU: `python -m experiments.price`."""
