"""Finds what bounds a private step: `python -m experiments.profile_bottlenecks`."""
