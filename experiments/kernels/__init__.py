"""The kernels against the library: `python -m experiments.kernels`."""
