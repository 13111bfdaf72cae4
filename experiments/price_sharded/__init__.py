"""Cost of a private step under FSDP2: `python -m experiments.price_sharded`."""
