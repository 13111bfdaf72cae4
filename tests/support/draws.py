"""Loaders over numbers, whose batches tell what was drawn."""

from itertools import chain

import torch
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping.sampling.loader import PoissonLoader

KEY = bytes(range(32))


def numbers(count: int) -> TensorDataset:
    """Sample i is the number i, so that a batch tells what was drawn."""
    return TensorDataset(torch.arange(count))


def poisson(count=60, batch_size=6, *, key=KEY, rank=0, world_size=1, **options) -> PoissonLoader:
    loader = DataLoader(numbers(count), batch_size=batch_size, **options)
    return PoissonLoader(loader, key=key, rank=rank, world_size=world_size)


def drawn(loader) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


def joined(lists) -> list:
    return list(chain.from_iterable(lists))
