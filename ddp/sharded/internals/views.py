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

from ddp.sharded.internals.divided import Place, hide_all, nothing, reveal_all
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import version_of

RESHAPED = (
    "a parameter of shape {before} has been given the shape {now} and {dtype}: wrap the network "
    "anew, and make another optimizer"
)
NO_COPY = (
    "{name} got .data whose memory fsdp frees, such as that of another parameter: give it a copy, "
    "value.clone()"
)


def memory_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns what changes where a parameter gets other `.data`, of each."""
    return [(id(x.untyped_storage()), x.storage_offset(), x.stride(), x.size()) for x in tensors]


def bind(units: Sequence[Any], frees: bool = False) -> bool:
    """Makes parameters views of their units' values, which take what the parameters hold.

    All values are read before the first one is written: parameters may have been exchanged.

    Args:
        frees: the memory of the values is freed later.

    Returns:
        Whether a parameter had other `.data`.

    Raises:
        RuntimeError: for `.data` of another shape or dtype; for one in memory that is freed: what
            autograd has saved of it would be others after the next gather.
    """
    moved = []
    for unit in units:
        now, then = memory_of(unit.parameters), memory_of(unit.value_views)
        moved += [(unit, i) for i in range(len(now)) if now[i] != then[i]] if now != then else []
    for unit, i in moved:
        p, view = unit.parameters[i], unit.value_views[i]
        if (p.shape, p.dtype) != (view.shape, view.dtype):
            before, now = [*view.shape], [*p.shape]
            raise RuntimeError(RESHAPED.format(before=before, now=now, dtype=p.dtype))
        freed = [unit.values for unit in units] + [nothing(p.dtype, p.device)] if frees else []
        if view.numel() and any(x.untyped_storage() is p.untyped_storage() for x in freed):
            raise RuntimeError(NO_COPY.format(name=unit.places[i].name))
    held = [unit.parameters[i].detach().clone() for unit, i in moved]
    for (unit, i), value in zip(moved, held, strict=True):
        unit.parameters[i].data = unit.value_views[i].copy_(value)
    return bool(moved)


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
        self.places = [Place(myself, i, name) for i, name in enumerate(names)]
        for parameter in self.parameters:
            parameter.grad = None
        stale = self.parameters, self.places, self.values.dtype
        hide_all(*stale)
        weakref.finalize(self, hide_all, *stale).atexit = False  # once this has gone

    def show(self) -> None:
        """Makes the parameters views of the values, unless they are."""
        if self.is_shown:
            return
        self.is_shown = True
        reveal_all(self.parameters, self.places, self.value_views)
        self._versions = list(map(version_of, self.parameters))

    def hide(self) -> None:
        """Makes the parameters stand-ins, and this rank's slice what was written to them.

        Nothing counts what a forward writes through `.data`: behind it the values are compared.
        """
        if not self.is_shown:
            return
        is_replaced = bind([self], frees=True)
        versions = list(map(version_of, self.parameters))
        if self.was_called or is_replaced or self._versions != versions:
            from ddp.internals.kernels import take_written  # imports Triton

            take_written(self.own(self.values), self.shard)
        self.is_shown = self.was_called = False
        hide_all(self.parameters, self.places, self.values.dtype)

    @torch.no_grad()
    def keep(self, whole: dict[int, Tensor]) -> None:
        """Makes whole tensors the values of some parameters: this rank keeps what it owns."""
        for piece in self.pieces:
            if (value := whole.get(piece.member)) is not None:
                piece.of(self.shard).copy_(piece.of_parameter(value.contiguous()))
