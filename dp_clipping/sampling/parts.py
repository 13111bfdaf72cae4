"""Tells whether parts of a batch have rows in common, by where their tensors are in memory."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dp_clipping.torch_compat import version_of


class Slice(NamedTuple):
    """Consecutive rows of a larger tensor, as `x[8:16]` or `x.split(8)` gives.

    Attributes:
        storage: the memory of the larger tensor. Kept, so that no other tensor gets this memory.
        place: all else that two slices of one tensor have in common, its version included.
        rows: which rows of it.
    """

    storage: torch.UntypedStorage
    place: tuple
    rows: range


def slices_of(tensors: Iterable[tuple[Tensor, int]]) -> list[Slice]:
    """Returns the tensors as slices of their memory: (tensor, dimension that counts the rows).

    Tensors whose rows may share memory are left out.
    """
    return [one for x, dim in tensors if (one := _slice_of(x, dim)) is not None]


def _slice_of(x: Tensor, dim: int) -> Slice | None:
    if type(x) is not Tensor or x.layout is not torch.strided or not x.numel():
        return None
    stride, offset = x.stride(dim), int(x.storage_offset())
    if not stride or _overlaps(x):
        return None
    outer = min((s for s in x.stride() if s > stride), default=offset + 1)
    start, column = divmod(offset % outer, stride)
    sizes = (*x.shape[:dim], *x.shape[dim + 1 :])
    place = (x.dtype, dim, x.stride(), sizes, offset // outer, column, version_of(x))
    return Slice(x.untyped_storage(), place, range(start, start + x.shape[dim]))


def _overlaps(x: Tensor) -> bool:
    """Returns whether two of its elements may be one in memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def apart(one: Sequence[Slice], other: Sequence[Slice]) -> bool:
    """Returns whether two parts of a batch provably have no row in common.

    They do not if both have different rows of one tensor: other tensors of them may be copies.
    """
    return any(
        a.storage.data_ptr() == b.storage.data_ptr()
        and a.place == b.place
        and (a.rows.stop <= b.rows.start or b.rows.stop <= a.rows.start)
        for a in one
        for b in other
    )
