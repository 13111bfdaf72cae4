"""The kernels against the library: `experiments.kernels`."""
