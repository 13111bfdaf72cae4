"""Makes batches without samples: a Poisson batch may be empty, and its step is like any other."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CollateWithEmpty:
    """A collate function that also knows what no samples look like: `empty`, made once.

    Two collated copies of `sample` beside one tell a list with an entry for every sample, which
    becomes empty, from one that is structure. With `dummy`, no samples become one sample whose
    tensors are random zeros and ones. Raises ValueError for what might carry the sample itself into
    an empty batch: anything but tensors, arrays, numbers, strings and None in mappings, lists and
    tuples. Numbers and strings that are not in a list of samples stay as they are.
    """

    def __init__(
        self, collate_fn: Callable[[list], Any], sample: Any, *, batch_dim: int, dummy: bool
    ) -> None:
        self.collate_fn = collate_fn
        self.batch_dim = batch_dim
        # Copies, because some collate functions change their samples.
        one = collate_fn([copy.deepcopy(sample)])
        two = collate_fn([copy.deepcopy(sample) for _ in range(2)])
        # A generator of its own: the user's streams stay as they are.
        self.empty = self._dummy(one, torch.Generator()) if dummy else self._empty(one, two)

    def __call__(self, samples: list) -> Any:
        # A copy, because users may change a batch.
        return self.collate_fn(samples) if len(samples) else copy.deepcopy(self.empty)

    def _empty(self, one: Any, two: Any) -> Any:
        if isinstance(one, Tensor | np.ndarray) and one.ndim > 0:
            dim = min(self.batch_dim, one.ndim - 1)  # labels have one dimension in any case
            shape = (*one.shape[:dim], 0, *one.shape[dim + 1 :])
            # New ones: a slice would keep the sample's storage.
            return one.new_empty(shape) if isinstance(one, Tensor) else np.empty(shape, one.dtype)
        if isinstance(one, list | tuple) and len(one) != len(two):
            return type(one)()
        return _map_entries(self._empty, one, two)

    def _dummy(self, one: Any, generator: torch.Generator) -> Any:
        if isinstance(one, Tensor):
            return torch.randint(2, one.shape, generator=generator).to(one)
        if isinstance(one, np.ndarray):
            return torch.randint(2, one.shape, generator=generator).numpy().astype(one.dtype)
        return _map_entries(lambda entry: self._dummy(entry, generator), one)


def _map_entries(function: Callable[..., Any], one: Any, *others: Any) -> Any:
    """Returns a container with `function` applied to its entries; a plain value as it is."""
    if isinstance(one, Mapping):
        entries = {key: function(one[key], *(other[key] for other in others)) for key in one}
        if not isinstance(one, MutableMapping):
            return type(one)(entries)
        result = copy.copy(one)  # keeps what else such a class holds, e.g. a BatchEncoding
        result.update(entries)
        return result
    if isinstance(one, list | tuple):
        entries = [function(*entry) for entry in zip(one, *others, strict=True)]
        return type(one)(*entries) if hasattr(one, "_fields") else type(one)(entries)
    if one is None or isinstance(one, int | float | complex | str | bytes | np.generic | Tensor):
        return one
    raise ValueError(
        f"collate_fn makes a {type(one).__name__}, and what no samples look like is not known of "
        "it: make tensors, arrays, numbers, strings or None, in dicts, lists or tuples"
    )
