"""Measures what a private step costs on many kinds of network: `experiments.networks`."""
