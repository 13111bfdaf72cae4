"""Tests of private training. Their reference is that of `experiments.verify_correctness`."""

from experiments import oracle

__all__ = ["oracle"]
