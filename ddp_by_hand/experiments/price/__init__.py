"""Cost of a private step on one GPU: `python -m ddp_by_hand.experiments.price`."""
