"""Finds a sample that is padded in its batch, and makes arguments of a forward without its padding.

The loader collates some samples of a batch alone (`sampling.alone.Alone`). Where a tensor
of the batch has another size than that of one sample alone, its dimension is a length. An argument
of the network that is a tensor of the batch, perhaps transposed or shifted by one, has the same
lengths. In others a dimension of the batch's length is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dp_clipping.sampling.alone import Alone, beside, equal, sample_dim

Sizes = dict[int, tuple[int, int]]
"""Dimension -> its size in the batch, and that of the sample alone."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of the loader's batch, beside that of one sample alone.

    Attributes:
        whole, alone: the tensors.
        dim: the dimension that counts the samples; None: there is none.
        sizes: of the other dimensions, where they differ.
        is_random: it has random numbers, so that its parts cannot be compared.
    """

    whole: Tensor
    alone: Tensor
    dim: int | None
    sizes: Sizes
    is_random: bool

    def fits(self, row: int, at_end: bool) -> bool:
        """Returns whether the sample alone is what a row of the batch has at its start or end."""
        return equal(cut(self.row(row), self.sizes, at_end), self.alone)

    def holds_a_part(self, row: int) -> bool:
        """Returns whether a row of the batch is the sample with something cut off, not padding."""
        if len(self.sizes) != 1:
            return False
        ((dim, (short, long)),) = self.sizes.items()
        x = self.row(row)
        for start in range(long - short + 1 if short < long else 0):
            if equal(self.alone.narrow(dim, start, short), x):
                y = self.alone.movedim(dim, 0)
                rest = torch.cat((y[:start], y[start + short :]))
                return bool((rest != rest[:1]).any()) or not equal(rest[0], y[long - start - 1])
        return False

    def transposed(self) -> "Leaf":
        """Returns the leaf with its first two dimensions exchanged."""
        dims = {0: 1, 1: 0}
        return Leaf(
            self.whole.transpose(0, 1), self.alone.transpose(0, 1),
            None if self.dim is None else dims.get(self.dim, self.dim),
            {dims.get(d, d): pair for d, pair in self.sizes.items()}, self.is_random,
        )  # fmt: skip

    def row(self, row: int) -> Tensor:
        return self.whole if self.dim is None else self.whole.narrow(self.dim, row, 1)


def padded_samples(whole: Any, alone: Alone, rows: int) -> list["Padded"]:
    """Returns the samples that have other lengths in the batch than alone.

    Args:
        whole: the batch.
        alone: samples of it, alone.
        rows: the rows of the batch's tensors: padding may follow the samples.
    """
    found = [(place, _leaves(whole, alone, i, rows)) for i, place in enumerate(alone.places)]
    others = [pair for pair in found if any(leaf.sizes for leaf in pair[1])]
    of_length = [pair for pair in found if not any(leaf.sizes for leaf in pair[1])]
    long = [_place_of(leaves, place, alone.size)[0] for place, leaves in of_length]
    return [Padded(leaves, place, alone.size, long) for place, leaves in others]


class Padded:
    """A sample of a batch that is padded there: alone it is shorter.

    Args:
        leaves: the tensors of the batch.
        place: of the sample in the batch.
        size: the number of samples.
        company: rows of samples that have the length of the batch.

    Attributes:
        row: of the sample.
        company: rows of others: one that has the length of the batch, or all.
        at_end: the sample is at the end of its row.
        sizes: length in the batch -> length alone.
        is_padded: the sample is longer in the batch than alone.
    """

    def __init__(self, leaves: list[Leaf], place: int, size: int, company: list[int]):
        self._leaves = leaves
        self.row, self.at_end = _place_of(leaves, place, size)
        self.company = company[:1] or [i for i in range(size) if i != self.row]
        pairs = {pair for leaf in leaves for pair in leaf.sizes.values()}
        self.sizes = dict(pairs)
        own = [leaf for leaf in leaves if not leaf.whole.dim() and not leaf.fits(0, False)]
        self._numbers = {leaf.whole.item(): leaf.alone.item() for leaf in own}
        self._is_unclear = len(self.sizes) < len(pairs)
        self.is_padded = bool(pairs) and all(n > m for n, m in pairs)

    def part(self) -> tuple[int, int] | None:
        """Returns the lengths, in the batch and alone, of a sample that is cut there, or None."""
        for leaf in self._leaves:
            if leaf.holds_a_part(self.row):
                return next(iter(leaf.sizes.values()))
        return None

    def arguments(self, batch: Any) -> list[tuple[tuple, dict]]:
        """Returns arguments of a forward for the sample, twice, without its padding.

        Several, if it is not clear what is a length; none if they are not found in the arguments.

        Args:
            batch: the arguments of the batch, a `capture.samples.batch.Batch`.
        """
        known = [self._known(x) if isinstance(x, Tensor) else None for x in batch.leaves]
        self.sizes |= dict(pair for one in known if one for pair in one[0].values())
        others = [
            [n for n in x.shape if n in self.sizes]
            for x, one in zip(batch.leaves, known, strict=True)
            if one is None and isinstance(x, Tensor)
        ]
        if self._is_unclear and any(others):
            return []
        numbers = any(self._is_unknown(x) for x in batch.leaves)
        return [
            batch.with_leaves(partial(self._shortened, known, which, are_lengths))
            for which in (slice(None), slice(1), slice(-1, None))
            for are_lengths in (True, False)
            if (which == slice(None) or any(len(own) > 1 for own in others))
            and (numbers or are_lengths)
        ]

    def sizes_in(self, own: Tensor) -> Sizes | None:
        """Returns the lengths of the sample's part [1, ..] of a tensor; None: not the batch's."""
        for leaf in self._leaves:
            for one in (leaf, leaf.transposed()) if leaf.whole.dim() > 1 else (leaf,):
                if one.dim == 0 and equal(own, one.row(self.row)):
                    return one.sizes
        return None

    def _shortened(
        self, known: list[tuple[Sizes, Tensor | None] | None], which: slice, are_lengths: bool,
        n: int, x: Any, dim: int | None,
    ) -> Any:  # fmt: skip
        """Returns a leaf of the arguments as it is for the sample alone, twice.

        Args:
            known: of each leaf; see `_known`.
            which: of the dimensions with the size of a length are lengths.
            are_lengths: numbers that are equal to a length are lengths, too.
            n, x, dim: number of the leaf, the leaf, and its dimension that counts samples.
        """
        if type(x) is int:
            is_length = are_lengths and self._is_unknown(x)
            return self.sizes[x] if is_length else self._numbers.get(x, x)
        if not isinstance(x, Tensor):
            return x
        own = known[n]
        if own is not None and own[1] is not None:
            return own[1] if dim is None else torch.cat((own[1], own[1]), dim)
        dims = [d for d, size in enumerate(x.shape) if d != dim and size in self.sizes]
        sizes = {d: (x.shape[d], self.sizes[x.shape[d]]) for d in dims[which]}
        sizes = sizes if own is None else own[0]
        if dim is None:
            return cut(x, sizes, at_end=False).clone()
        twice = torch.tensor([self.row, self.row], device=x.device)
        return cut(x.index_select(dim, twice), sizes, self.at_end)

    def _is_unknown(self, x: Any) -> bool:
        """Returns whether a leaf of the arguments is a number that may be a length."""
        return type(x) is int and x in self.sizes and x not in self._numbers

    def _known(self, x: Tensor) -> tuple[Sizes, Tensor | None] | None:
        """Returns the lengths of an argument that is a tensor of the batch.

        And what it is for the sample alone, where that is no part of its row.
        """
        for leaf in self._leaves:
            for one in (leaf, leaf.transposed()) if leaf.whole.dim() > 1 else (leaf,):
                if equal(x, one.whole):
                    fits = one.is_random or one.fits(self.row, self.at_end)
                    return one.sizes, None if fits else one.alone.to(x)
                for dim, (n, m) in one.sizes.items():
                    shifted = (one.whole.narrow(dim, start, n - 1) for start in (0, 1))
                    if any(equal(x, y) for y in shifted):
                        return one.sizes | {dim: (n - 1, m - 1)}, None
        return None


def _leaves(whole: Any, alone: Alone, number: int, rows: int) -> list[Leaf]:
    """Returns the tensors of the batch beside those of one of the samples alone."""
    pairs = list(beside(whole, alone.batches[number]))
    random = alone.random if len(alone.random) == len(pairs) else (True,) * len(pairs)
    found = []
    for (x, y), is_random in zip(pairs, random, strict=True):
        if x.dim() == y.dim():
            dim = sample_dim(x, y, rows, alone.batch_dim)
            x = x if dim is None else x.narrow(dim, 0, alone.size)
            sizes = {d: pair for d, pair in sizes_of(x, y).items() if d != dim}
            found.append(Leaf(x, y, dim, sizes, is_random))
    return found


def _place_of(leaves: Sequence[Leaf], place: int, size: int) -> tuple[int, bool]:
    """Returns the row of a sample, and whether it is at the end of that.

    It is the one at its place unless another one fits better: a collate function may sort.
    """
    steady = [leaf for leaf in leaves if not leaf.is_random]
    best, found = -1, (place, False)
    for row in (place, *range(size)):
        for at_end in (False, True):
            fits = sum(leaf.fits(row, at_end) for leaf in steady)
            if fits > best:
                best, found = fits, (row, at_end)
        if best == len(steady):
            break
    return found


def sizes_of(x: Tensor, alone: Tensor) -> Sizes:
    """Returns the sizes of a sample's tensor in the batch and alone, where they differ."""
    pairs = enumerate(zip(x.shape, alone.shape, strict=True))
    return {d: (n, m) for d, (n, m) in pairs if n != m}


def cut(x: Tensor, sizes: Sizes, at_end: bool) -> Tensor:
    """Returns the part of a tensor that the sample has alone."""
    for dim, (n, m) in sizes.items():
        if m < n:
            x = x.narrow(dim, n - m if at_end else 0, m)
    return x.contiguous()
