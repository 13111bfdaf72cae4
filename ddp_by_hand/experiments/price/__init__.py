"""Cost of a private step of a Llama: `python -m ddp_by_hand.experiments.price`."""
