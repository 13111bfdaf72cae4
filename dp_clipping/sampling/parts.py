"""Tells whether parts of a batch have rows in common, by where their tensors are in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Says where the rows of a tensor are in memory.

    Attributes:
        storage: the memory. It is kept, so that no other tensor gets it.
        dtype, strides: as of the tensor.
        sizes: its shape.
        dim: the dimension that counts the rows.
        offset: of its first element.
        version: how often the memory was written to.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    dim: int
    offset: int
    version: int

    def is_apart(self, other: "Slice") -> bool:
        """Returns whether both are different rows of one tensor, as `x[:8]` and `x[8:]` are."""
        if self._of_rows(0) != other._of_rows(0):
            return False
        between, rest = divmod(other.offset - self.offset, self.strides[self.dim])
        rows, others = self.sizes[self.dim], other.sizes[self.dim]
        if rest or not (between >= rows or -between >= others):
            return False
        both = max(rows, between + others) - min(0, between)
        return not _overlaps(self.strides, self._with_rows(both))

    def may_meet(self, other: "Slice") -> bool:
        """Returns whether both may have an element in common, whatever tensors they are of."""
        if self.storage.data_ptr() != other.storage.data_ptr():
            return False
        (first, last), (first_other, last_other) = self._reach(), other._reach()
        return first < last_other and first_other < last

    def _reach(self) -> tuple[int, int]:
        """Returns its first byte, and the one after its last."""
        pairs = zip(self.strides, self.sizes, strict=True)
        last = self.offset + sum(stride * (size - 1) for stride, size in pairs)
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        return (*self.sizes[: self.dim], rows, *self.sizes[self.dim + 1 :])

    def _of_rows(self, rows: int) -> tuple:
        """Returns what slices of one tensor have in common."""
        return (
            self.storage.data_ptr(), self.dtype, self.strides, self._with_rows(rows), self.dim,
            self.version,
        )  # fmt: skip


def slices_of(tensors: Iterable[tuple[Tensor, int]], versions: Iterable[int]) -> list[Slice | None]:
    """Returns where tensors are: (tensor, dimension that counts its rows). None: not known."""
    pairs = zip(tensors, versions, strict=True)
    return [_slice_of(x, dim, version) for (x, dim), version in pairs]


def _slice_of(x: Tensor, dim: int, version: int) -> Slice | None:
    if type(x) is not Tensor or x.layout is not torch.strided or not x.numel():
        return None
    if not x.stride(dim):
        return None
    return Slice(
        x.untyped_storage(), x.dtype, x.stride(), tuple(x.shape), dim, int(x.storage_offset()),
        version,
    )  # fmt: skip


def _overlaps(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Returns whether two elements of such a tensor may be one in memory."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def apart(one: Sequence[Slice | None], other: Sequence[Slice | None]) -> bool:
    """Returns whether two parts of a batch are different rows of the same tensors, each of them.

    Where one tensor of both is a copy, nothing says which rows were copied. Samples that are in a
    tensor twice are not found.
    """
    if not len(one) == len(other) > 0 or None in one or None in other:
        return False
    pairs = [(i, j, a, b) for i, a in enumerate(one) for j, b in enumerate(other) if a and b]
    return all(a.is_apart(b) if i == j else not a.may_meet(b) for i, j, a, b in pairs)
