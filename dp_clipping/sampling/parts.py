"""Tells whether parts of a batch have rows in common, by where their tensors are in memory."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Slice(NamedTuple):
    """Says where the rows of a tensor are in memory.

    Attributes:
        storage: the memory. It is kept, so that no other tensor gets it.
        tensor: what all slices of one tensor have in common, as `x[:8]` and `x[8:]` do.
        rows: which of its rows they are.
        places: from its first element in memory to its last, in bytes.
    """

    storage: torch.UntypedStorage
    tensor: tuple
    rows: range
    places: range

    def is_apart(self, other: "Slice") -> bool:
        """Returns whether both are different rows of one tensor."""
        return self.tensor == other.tensor and not _meet(self.rows, other.rows)

    def may_meet(self, other: "Slice") -> bool:
        """Returns whether both may have an element in common, whatever tensors they are of."""
        is_same = self.storage.data_ptr() == other.storage.data_ptr()
        return is_same and _meet(self.places, other.places)


def slices_of(tensors: Iterable[tuple[Tensor, int]], versions: Iterable[int]) -> list[Slice | None]:
    """Returns where tensors are: (tensor, dimension that counts its rows). None: not known.

    Args:
        versions: how often each one's memory was written to.
    """
    pairs = zip(tensors, versions, strict=True)
    return [_slice_of(x, dim, version) for (x, dim), version in pairs]


def _slice_of(x: Tensor, dim: int, version: int) -> Slice | None:
    if type(x) is not Tensor or x.layout is not torch.strided or not x.numel():
        return None
    storage, offset, stride = x.untyped_storage(), int(x.storage_offset()), x.stride(dim)
    if not stride:
        return None
    rows, others = x.shape[dim], [(x.stride(d), n) for d, n in enumerate(x.shape) if d != dim]
    # Of the dimension that holds all rows.
    outer = min([step for step, n in others if n > 1 and step >= stride], default=None)
    first = (offset if outer is None else offset % outer) // stride
    if outer is not None and first + rows > outer // stride:
        return None
    sizes, begin = tuple(n for _, n in others), offset - first * stride
    last = offset + sum(step * (n - 1) for step, n in [(stride, rows), *others])
    size = x.dtype.itemsize
    return Slice(
        storage, (storage.data_ptr(), x.dtype, x.stride(), sizes, dim, begin, version),
        range(first, first + rows), range(size * offset, size * (last + 1)),
    )  # fmt: skip


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def apart(one: Sequence[Slice | None], other: Sequence[Slice | None]) -> bool:
    """Returns whether two parts of a batch are different rows of the same tensors, each of them.

    Where one tensor of both is a copy, nothing says which rows were copied. Samples that are in a
    tensor twice are not found, nor are rows that overlap (`x.unfold(..)`).
    """
    if not len(one) == len(other) > 0 or None in one or None in other:
        return False
    pairs = [(i, j, a, b) for i, a in enumerate(one) for j, b in enumerate(other) if a and b]
    return all(a.is_apart(b) if i == j else not a.may_meet(b) for i, j, a, b in pairs)
