"""What the modes cost a Llama under FSDP2: `python -m experiments.llama_fsdp`."""
