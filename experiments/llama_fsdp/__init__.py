"""Cost of private training of a Llama under FSDP2: `python -m experiments.llama_fsdp`."""
