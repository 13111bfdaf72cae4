"""Cost of private training of a Llama under FSDP2: `experiments.llama_fsdp`."""
