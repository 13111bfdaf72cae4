"""Reads what the user's loader says of batches, and refuses one that cannot be replaced."""

import math
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from dp_clipping.kinds import is_count
from dp_clipping.sampling.units import units_in


def kept_options(loader: DataLoader) -> dict[str, Any]:
    """Returns the arguments that a loader which replaces the user's keeps.

    `in_order` is not among them: a batch is told from the order in which it arrives.
    """
    names = (
        "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator "
        "prefetch_factor persistent_workers"
    )
    return {name: getattr(loader, name) for name in names.split()}


def batch_size_of(loader: DataLoader) -> int | None:
    """Returns the samples in a batch of the loader; None: its batch sampler does not say."""
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return size if is_count(size) else None


def expected_batch_size_of(
    loader: DataLoader, world_size: int, examples_per_unit: int = 1
) -> float:
    """Returns the units of a batch of the loader, times the ranks if each has its own data."""
    units = _units_in_batch(loader, examples_per_unit, "expected_batch_size=")
    return float(units * (world_size if _distributed_sampler_of(loader) else 1))


def batches_of(loader: DataLoader, units: int, examples_per_unit: int) -> int:
    """Returns the number of batches per epoch of `units` units."""
    sampler = _distributed_sampler_of(loader)
    each = -(-units // (1 if sampler is None else sampler.num_replicas))
    instead = "sample_rate=, the probability of each unit to be in a batch"
    full, rest = divmod(each, _units_in_batch(loader, examples_per_unit, instead))
    return max(1, full + bool(rest and not loader.drop_last))


def _units_in_batch(loader: DataLoader, examples_per_unit: int, instead: str) -> int:
    size = batch_size_of(loader)
    if size is None:
        raise ValueError(f"the loader has no batch_size: give {instead}")
    return units_in("data_loader's batch_size", size, examples_per_unit)


def _distributed_sampler_of(loader: DataLoader) -> DistributedSampler | None:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return sampler if isinstance(sampler, DistributedSampler) else None


def check_loader(loader: DataLoader, world_size: int) -> None:
    """Raises ValueError unless an epoch of the loader has each sample once, by its index."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"data_loader's {type(dataset).__name__} cannot be sampled by index: take its samples "
            "into a list, DataLoader(list(dataset), batch_size=64), or give a dataset with "
            "__getitem__ and __len__, or poisson_sampling=False"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "data_loader has batch_size=None: give a batch size: it sets the sample rate"
        )
    if len(loader) == 0:
        raise ValueError(
            f"data_loader has no batches of its {len(dataset)} samples: give more data, a "
            "smaller batch_size or drop_last=False"
        )
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if not _visits_all(sampler, loader, world_size):
        raise ValueError(
            f"data_loader's {type(sampler).__name__} does not visit each of the {len(dataset)} "
            "samples alike, once an epoch, as Poisson sampling does: for a part of the data give "
            "torch.utils.data.Subset(dataset, indices) and no sampler, for all of it shuffle=True"
        )
    _check_empty_batch(dataset)


def _check_empty_batch(dataset: Any) -> None:
    """Raises ValueError if the dataset reads batches by itself, but not one without samples."""
    while type(dataset) is Subset:  # it asks the one below
        dataset = dataset.dataset
    read = getattr(dataset, "__getitems__", None)
    if not callable(read):
        return
    try:
        found = read([])
        has_samples = len(found) and isinstance(found, list)  # else columns, for the collate_fn
    except Exception as error:
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__([]) raises {error!r}, and a batch may be "
            "without samples: begin it with: if not indices: return []"
        ) from error
    if has_samples:
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__([]) returns samples, and a batch may "
            "be without any: begin it with: if not indices: return []"
        )


def _visits_all(sampler: Any, loader: DataLoader, world_size: int) -> bool:
    """Returns whether an epoch of all data-parallel ranks has each index exactly once.

    Told from what torch's own samplers are. Any other is asked for an epoch, whose order nothing
    uses; it may leave out less than a batch with `drop_last`.
    """
    dataset: Any = loader.dataset
    size = len(dataset)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != world_size:
            raise ValueError(
                f"data_loader's DistributedSampler has num_replicas {sampler.num_replicas}, and "
                f"there are {world_size} data-parallel ranks: give num_replicas={world_size}"
            )
        rounded = math.floor if sampler.drop_last else math.ceil
        divided: Any = sampler.dataset
        return len(divided) == size and len(sampler) == rounded(size / world_size)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        return False
    if type(sampler) in (SequentialSampler, RandomSampler):
        return len(sampler) == len(sampler.data_source) == size
    with torch.random.fork_rng(devices=[]):
        visited = list(islice(sampler, len(sampler)))
    spare = 0
    if sampler is loader.batch_sampler:
        spare = (batch_size_of(loader) or 1) - 1 if getattr(sampler, "drop_last", False) else 0
        visited = [index for batch in visited for index in batch]
    found = {int(index) for index in visited}
    return len(found) == len(visited) >= size - spare and found <= set(range(size))
