"""Programs of the course and of private training, and what they are made of.

What users run: `exercises`, `examples`, `bench` (the benchmark), `experiments`. What these share:
`tracing`, `measure`, and `lm`, the network and the ranks that are measured. `torch_versions` is for
`ddp` and `dp_clipping` too: it warns of a PyTorch that nothing here is tested with.
"""
