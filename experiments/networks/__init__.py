"""Measures what a private step costs on many kinds of network: `python -m experiments.networks`."""
