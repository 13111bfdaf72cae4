"""Makes batches without samples, and batches of one size.

A Poisson batch may be empty, and its step is like any other. Where all batches are to have one
shape, copies of a row follow the samples.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.trials.holders import held_by, holding


class CollateWithEmpty:
    """A collate function that also makes a batch of no samples: `empty`, made once.

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
        try:
            two = collate_fn([copy.deepcopy(sample) for _ in range(2)])
            # A generator of its own: the user's streams stay as they are.
            self.empty = self._dummy(one, torch.Generator()) if dummy else self._empty(one, two)
        except RecursionError as error:
            raise ValueError(
                "collate_fn makes a batch that holds itself, perhaps as the parent of what it "
                "holds, so its samples cannot be taken apart: let it return the tensors "
                "themselves, as return node.x, labels"
            ) from error

    def __call__(self, samples: list) -> Any:
        # A copy, because users may change a batch.
        return self.collate_fn(samples) if len(samples) else copy.deepcopy(self.empty)

    def _empty(self, one: Any, two: Any) -> Any:
        if isinstance(one, PackedSequence):
            return PackedSequence(*(x if x is None else x.new_empty(0, *x.shape[1:]) for x in one))
        if isinstance(one, Tensor | np.ndarray) and one.ndim > 0:
            dim = growing_dim(one, two, self.batch_dim)
            if dim is None and one.ndim == two.ndim:  # the same for all, as a mask [T, T]
                return _zeros(one)
            dim = dim or 0  # None: one sample is squeezed
            shape = (*one.shape[:dim], 0, *one.shape[dim + 1 :])
            # New ones: a slice would keep the sample's storage.
            return one.new_empty(shape) if isinstance(one, Tensor) else np.empty(shape, one.dtype)
        if isinstance(one, list | tuple) and len(one) != len(two):
            return type(one)()
        return _map_entries(self._empty, one, two)

    def _dummy(self, one: Any, generator: torch.Generator) -> Any:
        if isinstance(one, PackedSequence):
            return one._replace(data=self._dummy(one.data, generator))
        if isinstance(one, Tensor):
            return torch.randint(2, one.shape, generator=generator, device="cpu").to(one)
        if isinstance(one, np.ndarray):
            return (
                torch.randint(2, one.shape, generator=generator, device="cpu")
                .numpy()
                .astype(one.dtype)
            )
        return _map_entries(lambda entry: self._dummy(entry, generator), one)


class PaddedCollate:
    """A collate function whose batches have `rows` samples each: copies of the first one follow.

    A network computes with a copy as with the sample, whatever it asks of its content (a length
    above zero, a token that is not masked), and what comes of it is left out. Two collated copies
    of `sample` beside one tell which tensors, arrays and lists grow with the samples: copies follow
    in these, all else stays. So all batches have one shape if `collate_fn` gives one shape for one
    number of samples: sequences must be padded to a fixed length. Without samples all rows are
    copies of `sample`.

    Raises:
        ValueError: for what holds other than one row per sample (tokens of all samples in one row).
    """

    def __init__(
        self, collate_fn: Callable[[list], Any], sample: Any, *, batch_dim: int, rows: int
    ) -> None:
        self.collate_fn, self.batch_dim, self.rows = collate_fn, batch_dim, rows
        if isinstance(collate_fn, CollateWithEmpty):
            self.collate_fn = collate_fn.collate_fn
        self._one = self.collate_fn([copy.deepcopy(sample)])
        self._two = self.collate_fn([copy.deepcopy(sample) for _ in range(2)])
        self([])  # raises for what cannot be padded

    def __call__(self, samples: list) -> Any:
        batch = self.collate_fn(samples) if len(samples) else copy.deepcopy(self._one)
        return self._padded(max(1, len(samples)), batch, self._one, self._two)

    def _padded(self, count: int, batch: Any, one: Any, two: Any) -> Any:
        if isinstance(one, PackedSequence):
            raise ValueError(PADDED.format(what="a PackedSequence", count=count))
        if isinstance(one, Tensor | np.ndarray):
            return batch if one.shape == two.shape else self._padded_rows(count, batch, one, two)
        if isinstance(one, list | tuple) and len(one) != len(two):
            if (len(one), len(two), len(batch)) != (1, 2, count):
                raise ValueError(PADDED.format(what=f"a list of {len(batch)}", count=count))
            copies = [copy.deepcopy(batch[0]) for _ in range(self.rows - count)]
            return type(batch)([*batch, *copies])
        return _map_entries(lambda *entries: self._padded(count, *entries), batch, one, two)

    def _padded_rows(self, count: int, batch: Any, one: Any, two: Any) -> Any:
        dim = growing_dim(one, two, self.batch_dim) or 0  # None: one is squeezed, and refused
        if (one.shape[dim], two.shape[dim], batch.shape[dim]) != (1, 2, count):
            what = f"a tensor of shape {tuple(batch.shape)}"
            raise ValueError(PADDED.format(what=what, count=count))
        rows = [*range(count), *[0] * (self.rows - count)]
        return batch[(slice(None),) * dim + (rows,)]


def growing_dim(one: Any, two: Any, batch_dim: int) -> int | None:
    """Returns the dimension that counts the samples, from tensors or arrays of one and of two.

    It is `batch_dim` if that one grows. Labels may have one dimension less than inputs, and a loop
    may exchange two of them after the loader. None: none grows.
    """
    grown = [dim for dim, (n, m) in enumerate(zip(one.shape, two.shape, strict=False)) if n != m]
    return batch_dim if batch_dim in grown else next(iter(grown), None)


PADDED = (
    "collate_fn makes {what} of {count} samples, and pad_batches adds copies where each sample has "
    "one row: let dimension 0 of each tensor (of inputs 1, with batch_first=False) count the "
    "samples, or use pad_batches=False"
)


def _zeros(entry: Any) -> Any:
    """Returns zeros in the entry's place, of its shape and type."""
    if isinstance(entry, Tensor):
        return torch.zeros_like(entry)
    if isinstance(entry, np.ndarray):
        return np.zeros_like(entry)
    if isinstance(entry, bool | int | float | complex | str | bytes | np.generic):
        return type(entry)()
    return _map_entries(_zeros, entry)


def _map_entries(function: Callable[..., Any], one: Any, *others: Any) -> Any:
    """Returns a container with `function` applied to its entries; a plain value as it is."""
    if isinstance(one, Mapping) and not isinstance(one, MutableMapping):
        return type(one)({key: function(one[key], *(x[key] for x in others)) for key in one})
    if held := held_by(one):
        rest = list(map(held_by, others))
        return holding(one, {key: function(x, *(y[key] for y in rest)) for key, x in held.items()})
    if isinstance(one, list | tuple):
        entries = [function(*entry) for entry in zip(one, *others, strict=True)]
        return type(one)(*entries) if hasattr(one, "_fields") else type(one)(entries)
    plain = int | float | complex | str | bytes | np.generic | Tensor | MutableMapping
    if one is None or isinstance(one, plain):
        return one
    raise ValueError(
        f"collate_fn makes a {type(one).__name__}, and what no samples look like is not known of "
        "it: make tensors, arrays, numbers, strings or None, in dicts, lists, tuples or dataclasses"
    )
