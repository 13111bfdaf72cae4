"""The norms of one backward, by parameter, and their sums over ranks that have parts of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.norms import Norms
from dp_clipping.distributed.norm_reduce import Layerwise, SplitNorms
from dp_clipping.kernels.launch.tiles import on_device
from dp_clipping.layers.recorder import Trainable


class StepNorms:
    """Norms of the parameters of one batch.

    Args:
        context: what all steps of the model have in common, a `context.StepContext`.
        batch_size: samples of the batch.

    Attributes:
        table: the norms that have been taken.
        split: what other ranks have to add; None: they have other samples.
    """

    def __init__(self, context: Any, batch_size: int):
        capture = context.capture
        self._order = list(reversed(capture.trained))  # as backward reaches them
        self._reducer, self._timer = context.reducer, context.timer
        self.split: SplitNorms | None = None
        if self._reducer.splits_parameters:
            self.split = SplitNorms(self._reducer, context.sharding)
        zero = torch.zeros(batch_size, dtype=torch.float32, device=capture.trigger.device)
        self.table = Norms(len(capture.members), zero, self._timer.part, on_device)
        self._partial: Layerwise | None = None
        self._left: set[Trainable] = set()  # whose norms are in it
        self._parts: list[Tensor] = []  # squared norms of this rank's parts, to be added up
        if self.split is not None and self._reducer.mode == "layerwise":
            self._partial = self._reducer.layerwise(self._order, self._own_table)

    @property
    def leave_early(self) -> bool:
        """Returns whether norms are sent to other ranks layer by layer, while backward runs."""
        return self._partial is not None

    def launch(self) -> None:
        """Sends the norms that have arrived, if they are sent during backward."""
        if self._partial is None:
            return
        with self._timer.part("norm_all_reduce"):
            for record in self._order:
                if record in self.table.known and record not in self._left:
                    self._left.add(record)
                    self._partial.add(record)

    def _own_table(self, records: Sequence[Any]) -> Tensor:
        """Returns this rank's part of norms that add up over ranks: see `SplitNorms.table`."""
        table = self.split.table(self.table, records)
        self._parts.append(table[0])
        return table

    def squares_and_bounds(self) -> tuple[Tensor, Tensor]:
        """Returns squared norms, and upper bounds for what is summed: [K, B] of whole samples."""
        if self.split is None:
            squared = self.table.squared()
            return squared, squared if self.table.is_exact else self.table.bounds()
        with self._timer.phase("norm_all_reduce"):
            if self._partial is None:
                total = self._reducer.reduce(self._own_table(list(self.table.known))).wait()
            else:
                total = self._partial.wait()
            return self.split.unpack(total)

    def own_squares(self) -> Tensor | None:
        """Returns squared norms of this rank's parts [K, B]; None if it has whole parameters."""
        return torch.stack(self._parts).sum(0) if self._parts else None
