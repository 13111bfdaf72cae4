"""Triton kernels, one idea a file; each has a plain PyTorch twin that says what it computes."""
