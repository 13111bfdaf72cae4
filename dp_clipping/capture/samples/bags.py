"""Bags: samples whose ids are concatenated, as `nn.EmbeddingBag(ids, offsets)` takes them.

No dimension of ids [N] counts samples: sample b has ids[offsets[b] : offsets[b + 1]].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bags:
    """Positions, among the flattened arguments (leaves), of tensors that hold bags.

    There is one bag per sample.

    Attributes:
        ids: the position of the ids [N].
        offsets: the position of the offsets [B] or [B + 1].
        weights: the position of the weights [N], one per id; None if there are none.
        has_last: whether the offsets end with the number of ids.
    """

    ids: int
    offsets: int
    weights: int | None = None
    has_last: bool = False

    @property
    def leaves(self) -> set[int]:
        return {self.offsets, *self.of_ids}

    @property
    def of_ids(self) -> list[int]:
        """Returns the positions of the leaves with a row for each id."""
        return [self.ids] if self.weights is None else [self.ids, self.weights]

    def at(self, places: Mapping[int, int]) -> Bags:
        """Returns the same bags with other positions: old position -> new one."""
        weights = None if self.weights is None else places[self.weights]
        return Bags(places[self.ids], places[self.offsets], weights, self.has_last)

    def size(self, leaves: Sequence[Any]) -> int:
        """Returns the number of bags."""
        return max(0, len(leaves[self.offsets]) - self.has_last)

    def lengths(self, leaves: Sequence[Any]) -> Tensor:
        """Returns the number of ids of each bag [B]."""
        offsets = leaves[self.offsets]
        if not self.has_last:
            offsets = torch.cat((offsets, offsets.new_tensor([len(leaves[self.ids])])))
        return offsets.diff().clamp(min=0)

    def take(self, leaves: Sequence[Any], rows: Tensor) -> dict[int, Tensor]:
        """Returns position -> leaf with the samples `rows` alone, in this order."""
        offsets = leaves[self.offsets]
        rows = rows.to(offsets.device)
        lengths = self.lengths(leaves)[rows]
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        starts = (offsets[rows] - ends + lengths).repeat_interleave(lengths)
        places = starts + torch.arange(total, device=offsets.device, dtype=starts.dtype)
        new = torch.cat((ends.new_zeros(1), ends if self.has_last else ends[:-1]))
        found = {n: leaves[n].index_select(0, places.to(leaves[n].device)) for n in self.of_ids}
        return found | {self.offsets: new[: len(rows) + self.has_last].to(offsets.dtype)}

    def scale(self, leaves: Sequence[Any], factors: Tensor) -> dict[int, Tensor]:
        """Returns position -> weights, each sample's times its factor [B]; {} without weights."""
        if self.weights is None or not leaves[self.weights].is_floating_point():
            return {}
        weights = leaves[self.weights]
        factors = factors.to(weights).repeat_interleave(self.lengths(leaves).to(weights.device))
        return {self.weights: weights * factors}

    def rows(self, leaves: Sequence[Any], count: int) -> list[list[Tensor]]:
        """Returns the rows of each of the first `count` samples, for each leaf with rows."""
        lengths = self.lengths(leaves)[:count].tolist()
        return [list(leaves[n][: sum(lengths)].split(lengths)) for n in self.of_ids]

    def one_of_zeros(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Returns position -> leaf for a single sample whose only id is 0."""
        offsets = leaves[self.offsets]
        found = {n: leaves[n].new_zeros(1) for n in self.of_ids}
        return found | {self.offsets: offsets.new_tensor([0, 1][: 1 + self.has_last])}


def place_of(x: Tensor, leaves: list[Any]) -> int | None:
    """Returns the position of the leaf that x is, or is a view or copy of; None if not unique."""
    same = [n for n, y in enumerate(leaves) if y is x]
    if not same:
        alike = [(n, y) for n, y in enumerate(leaves) if isinstance(y, Tensor)]
        alike = [(n, y) for n, y in alike if y.shape == x.shape and y.device == x.device]
        same = [n for n, y in alike if y.data_ptr() == x.data_ptr() and len(x)]
        same = same or [n for n, y in alike if torch.equal(y.to(x.dtype), x)]
    return same[0] if len(same) == 1 else None
