"""Parameters as views of their unit's flat buffer, and what code writes or gives to them.

Code may give a parameter other `.data`, or write to it. `zero1` looks for the first before each
step. `fsdp` looks for both before it frees the memory of whole values: a rank's slice follows, and
parameters are stand-ins without values from then on (divided.py).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp.sharded.internals.divided import Place, hide_all, reveal_all, unlike
from ddp.sharded.layout import FlatUnit
from ddp.sharded.torch_compat import refuse_writes
from ddp.torch_compat import version_of

RESHAPED = (
    "a parameter of shape {before} has been given the shape {now}: wrap the network anew, and make "
    "another optimizer"
)
NO_COPY = (
    "{name} got .data whose memory fsdp frees, such as that of another parameter: give it a copy, "
    "value.clone()"
)

Moved = list[tuple[Any, int]]
"""Parameters that got other `.data`: of each, its unit and its place there."""


def memory_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns what changes where a parameter gets other `.data`, of each."""
    pointers, strides = map(Tensor.data_ptr, tensors), map(Tensor.stride, tensors)
    return list(zip(pointers, strides, map(Tensor.size, tensors), strict=True))


def moved_of(unit: FlatUnit, before: list[Any]) -> Moved:
    """Returns the parameters of a unit whose memory is another one than `before`."""
    now = memory_of(unit.parameters)
    return [] if now == before else [(unit, i) for i in range(len(now)) if now[i] != before[i]]


def view_again(moved: Moved) -> None:
    """Makes parameters views of their units' values again, which take what the parameters hold.

    All values are read before the first one is written: parameters may have been exchanged.
    """
    held = [unit.parameters[i].detach().clone() for unit, i in moved]
    for (unit, i), value in zip(moved, held, strict=True):
        unit.parameters[i].data = unit.value_views[i].copy_(value)


@torch.no_grad()
def bind(units: list[FlatUnit]) -> None:
    """Makes every parameter of `zero1` a view of its flat buffer, with the value that it has now.

    Raises:
        RuntimeError: for a parameter that has another shape than when it was wrapped.
    """
    moved = [found for unit in units for found in moved_of(unit, memory_of(unit.value_views))]
    for unit, i in moved:
        if (now := unit.parameters[i].shape) != (before := unit.shapes[i]):
            raise RuntimeError(RESHAPED.format(before=[*before], now=[*now]))
    view_again(moved)


def take_replaced(units: Sequence["DividedUnit"]) -> bool:
    """Takes other `.data` that whole parameters got; returns whether there were any.

    Raises:
        RuntimeError: for `.data` of another shape or dtype, or in memory of whole values: what
            autograd has saved of it would be others after the next gather.
    """
    moved: Moved = []
    for unit in units:
        moved += unit.moved()
    if not moved:
        return False
    freed = {0, *(unit.values.untyped_storage().data_ptr() for unit in units)}
    for unit, i in moved:
        parameter, view, name = unit.parameters[i], unit.value_views[i], unit.places[i].name
        if parameter.shape != view.shape or parameter.dtype != view.dtype:
            raise RuntimeError(unlike(name, parameter))
        if view.numel() and parameter.untyped_storage().data_ptr() in freed:
            raise RuntimeError(NO_COPY.format(name=name))
    view_again(moved)
    return True


class DividedUnit(FlatUnit):
    """A unit of `fsdp`, whose parameters are stand-ins, or views of the values while these are.

    Attributes:
        places: which value each stand-in is for.
        is_shown: the parameters are views.
        was_called: code of a forward has run since then, and may have written to them.
        replaced: how often each stand-in got other `.data`.
        before_use: weakly, what is called before whole values of stand-ins are gathered, with what
            they are for.
    """

    def make_stand_ins(self, names: Sequence[str]) -> None:
        """Makes the parameters stand-ins; once, when the unit has its values.

        Args:
            names: of the parameters, for messages.
        """
        self.is_shown = self.was_called = False
        self.replaced = [0] * len(self.parameters)
        self.before_use: Callable[[], Callable[[str], None] | None] = lambda: None
        myself = weakref.ref(self)
        names = names or [f"a parameter {list(p.shape)}" for p in self.parameters]
        self.places = [Place(myself, i, name) for i, name in enumerate(names)]
        dtype = self.values.dtype
        nothing = self.values.new_full((), torch.nan if dtype.is_floating_point else 0)
        self._nothing = nothing  # all that C++ sees of stand-ins
        refuse_writes(nothing)
        for parameter in self.parameters:
            parameter.grad = None
        stale = self.parameters, self.places, nothing
        hide_all(*stale)
        weakref.finalize(self, hide_all, *stale).atexit = False  # once this has gone

    def show(self) -> None:
        """Makes the parameters views of the values, unless they are."""
        if self.is_shown:
            return
        self.is_shown = True
        reveal_all(self.parameters, self.places, self.value_views)
        self._versions = list(map(version_of, self.parameters))
        self._memory = memory_of(self.parameters)

    def hide(self) -> None:
        """Makes the parameters stand-ins, and this rank's slice what was written to them."""
        if not self.is_shown:
            return
        is_replaced = take_replaced([self])
        versions = list(map(version_of, self.parameters))
        if self.was_called or is_replaced or self._versions != versions:
            from ddp.sharded.internals.written import take_written  # imports Triton

            take_written(self.own(self.values), self.shard)
        self.is_shown = self.was_called = False
        hide_all(self.parameters, self.places, self._nothing)

    def moved(self) -> Moved:
        """Returns the parameters that got other `.data` since they were shown."""
        if not self.is_shown:
            return []
        for parameter, place in zip(self.parameters, self.places, strict=True):
            try:
                parameter.data_ptr()
            except RuntimeError as error:  # `refuse_writes`: it got a stand-in's
                raise RuntimeError(NO_COPY.format(name=place.name)) from error
        return moved_of(self, self._memory)

    @torch.no_grad()
    def keep(self, whole: dict[int, Tensor]) -> None:
        """Makes whole tensors the values of some parameters: this rank keeps what it owns."""
        for piece in self.pieces:
            if (value := whole.get(piece.member)) is not None:
                piece.of(self.shard).copy_(piece.of_parameter(value.contiguous()))
