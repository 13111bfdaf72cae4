"""What a private step costs under FSDP2: `python -m experiments.price_sharded`."""
