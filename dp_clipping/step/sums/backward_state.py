"""Holds the state of one backward: plans of its layers, norms of what these leave, and versions.

    PlainPlans    how each linear layer is handled: in a step on kernels, `layer_plans`
    StepNorms     norms by parameter, and their sums over ranks that have parts of it
    Kept          refuses changes of what is kept, between its arrival and its use

Autograd gives one gradient tensor to all branches that need it, and a hook or a backward on another
branch may write to it after a layer has delivered it. So the versions of all tensors that are kept
are noted on arrival, and compared before norms and before sums are formed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.norms import Norms
from dp_clipping.distributed.norm_reduce import Layerwise, SplitNorms
from dp_clipping.kernels.launch.tiles import on_device
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.recorder import Trainable
from dp_clipping.torch_compat import version_of

Call = tuple[Trainable, torch.Size, torch.dtype, int]
"""A use of a linear layer: its weight, its input's shape [.., p] and dtype, and its outputs."""


class PlainPlans:
    """The plans of a step without kernels: none, as `Plain` chooses by what has arrived.

    Attributes:
        calls: uses of linear layers in forward, in order.
        measures: the forward is measured, so layers that are not planned call `note_other`.
        at_first: bytes in use before the forward.
        runs_twice: some layers' factors are computed again in a second backward.
        kept_as_they_are: weights whose factors are kept until their sums are formed.
        gradient_bytes: weight -> bytes of a G that is formed of what it leaves.
        roundable: weights whose float32 kernels round to 11 bits, if PyTorch may multiply it in
            TensorFloat-32: those of large products, but none that the plan has in a second
            backward of its own, that several ranks have whole, or whose algorithm the user has
            chosen. What is large does not depend on how many samples there are.
    """

    measures = runs_twice = False
    at_first = 0
    kept_as_they_are: Collection[Trainable] = ()
    gradient_bytes: Mapping[Trainable, int] = MappingProxyType({})
    roundable: Collection[Trainable] = ()

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def make(self) -> None:
        """Makes the plan, after the forward has called all layers."""

    def slots_of(self, handle: LayerState) -> Any:
        """Returns a weight's `WeightSlots` in a compiled region; None: a slot for its G."""
        return None

    @property
    def of_slots(self) -> Any:
        """Returns what determines the slots of a compiled forward, beside its batch size."""
        return None

    def foresaw_too_much(self) -> bool:
        """Returns whether a compiled forward has saved so little that the plan is another one."""
        return False


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


class Kept:
    """Refuses other versions, and in some steps other values, of the tensors that one step keeps.

    Attributes:
        values: notes values and compares them too, a `capture.checks.kept.KeptValues`, or None.
    """

    def __init__(self, values: Any = None) -> None:
        self.values = values

    def refuse_changed(
        self,
        noted: Iterable[tuple[tuple[Trainable, ...], tuple[Tensor, ...], tuple[int, ...]]],
        values: bool = True,
    ) -> None:
        """Raises RuntimeError if a tensor has changed since it was noted.

        Args:
            noted: parameters, the tensors of what is kept for them, and their versions then.
            values: their values were noted, too.
        """
        noted = list(noted)
        changed = [own for own, tensors, then in noted if then != tuple(map(version_of, tensors))]
        if self.values is not None and values and not changed:
            changed = self.values.others([one[:2] for one in noted])
        if changed:
            raise changed_in_place(dict.fromkeys(own[0].name for own in changed))


def changed_in_place(names: Iterable[str]) -> RuntimeError:
    """Returns the error for parameters of whose layers a kept tensor has changed."""
    return RuntimeError(
        f"{', '.join(names)}: the gradient of its layer's output, or its input, was changed in "
        "place in backward after the layer had used it, so its clipped sum would not be that of "
        "its norm: in a hook, or in the backward of a torch.autograd.Function on another branch, "
        "return a new tensor, as return gradient * 2 in place of return gradient.mul_(2)"
    )
