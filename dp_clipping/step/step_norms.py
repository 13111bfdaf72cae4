"""The norms of one backward, by parameter, and their sums over ranks that have parts of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.norms import Norm, Norms
from dp_clipping.distributed.norm_reduce import Layerwise, NormReducer
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.distributed.split_norms import SplitNorms
from dp_clipping.layers.recorder import Trainable
from dp_clipping.profiling.timer import Timer


class StepNorms:
    """Norms of the parameters of one batch.

    The arguments are fixed; `forget` resets the rest for the next backward.

    Args:
        order: all parameters, in the order in which backward reaches them.
        reducer: adds norms up over ranks.
        sharding: how the network is spread over ranks; None: it is not.
        timer: the timer of the step.
        like: a tensor on the norms' device.
        batch_size: samples of the batch.
        is_rescaled: whether the sum of a parameter will be rescaled (`layers.low_precision_sums`).

    Attributes:
        found: parameter -> its norm.
        joined: parameters whose norm is part of another one's in `found`.
        split: what other ranks have to add.
    """

    def __init__(
        self,
        order: list[Trainable],
        reducer: NormReducer,
        sharding: Sharding | None,
        timer: Timer,
        like: Tensor,
        batch_size: int,
        is_rescaled: Callable[[Trainable], bool],
    ):
        self.split = SplitNorms(reducer, sharding)
        self._order, self._reducer, self._timer = order, reducer, timer
        self._like, self._batch_size, self._is_rescaled = like, batch_size, is_rescaled
        self._count = 1  # clipping groups
        self.forget()

    def forget(self) -> None:
        """Drops the norms of a backward."""
        self.found: dict[Trainable, Norm] = {}
        self.joined: set[Trainable] = set()
        self._partial: Layerwise | None = None
        self._left: set[Trainable] = set()  # whose norms are in it
        self._parts: list[Tensor] = []  # squared norms of this rank's parts, exchange by exchange

    def begin(self, count: int) -> None:
        """Begins a backward, with `count` clipping groups."""
        self._count = count
        if self.split.is_split and self._reducer.mode == "layerwise":
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
            for parameter in (*self.found, *self.joined):
                if parameter not in self._left:
                    self._left.add(parameter)
                    self._partial.add(parameter)

    def _own_table(self, parameters: Sequence[Any]) -> Tensor:
        """Returns this rank's part of norms that add up over ranks: see `SplitNorms.table`."""
        rescaled = any(self._is_rescaled(p) for p in parameters)
        table = self.split.table(self.table(), parameters, rescaled)
        self._parts.append(table[0])
        return table

    def squares_and_bounds(self) -> tuple[Tensor, Tensor]:
        """Returns squared norms, and upper bounds for what is summed: [K, B] of whole samples."""
        if not self.split.is_split:
            table = self.table()
            return table.squared(), table.bounds()
        if self._partial is not None:
            with self._timer.phase("norm_all_reduce"):
                return self.split.unpack(self._partial.wait())
        self._parts.clear()  # groups that were clipped on their own are among all again
        return self.exchange(list(self.found))

    def exchange(
        self, parameters: list[Trainable], groups: slice | list[int] = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Returns the norms of some parameters and groups, exchanged now."""
        with self._timer.phase("norm_all_reduce"):
            table = self._own_table(parameters)[:, groups]
            return self.split.unpack(self._reducer.reduce(table).wait())

    def table(self, good: Tensor | None = None) -> Norms:
        """Returns all norms of the step, zero of samples that are not `good` [B]."""
        norms = self.found
        if good is not None:
            norms = {p: _only(norm, good) for p, norm in norms.items()}
        table = Norms(self._count, self.zero(), self._timer.part)
        table.update(norms)
        return table

    def zero(self) -> Tensor:
        """Returns zeros [B] of the norms' dtype."""
        dtype = next((norm.squared.dtype for norm in self.found.values()), torch.float32)
        return torch.zeros(self._batch_size, dtype=dtype, device=self._like.device)

    def own_squares(self) -> Tensor | None:
        """Returns squared norms of this rank's parts [K, B]; None if it has whole parameters."""
        return torch.stack(self._parts).sum(0) if self._parts else None


def _only(norm: Norm, good: Tensor) -> Norm:
    scale = None if norm.scale is None else norm.scale.where(good, 0.0)
    return replace(norm, squared=norm.squared.where(good, 0.0), scale=scale)


def norms_of(
    context: Any,
    batch_size: int,
    is_rescaled: Callable[[Trainable], bool] = lambda parameter: False,
) -> StepNorms:
    """Returns the norms of one batch of a model with this `StepContext`."""
    capture = context.capture
    return StepNorms(
        list(reversed(capture.trained)), context.reducer, context.sharding,
        context.timer, capture.trigger, batch_size, is_rescaled,
    )  # fmt: skip
