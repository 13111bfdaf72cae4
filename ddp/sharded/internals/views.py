"""Parameters as views of their unit's flat buffer, and what code writes to them.

`fsdp` looks for writes before it frees the memory of whole values: a rank's slice follows, and
parameters are stand-ins from then on (stand_in.py).
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp.sharded.internals.stand_in import hide_all, reveal_all
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import version_of

MOVED = (
    "{name} has got other memory than that of its slices, as by `p.data = value`, model.to() or "
    "another wrapper of the network: write `p.data.copy_(value)`, or wrap the network again and "
    "make another optimizer"
)


def refuse_moved(unit: FlatUnit, names: Sequence[str]) -> None:
    """Raises RuntimeError if a parameter of a unit is no view of its values any more."""
    for p, view, name in zip(unit.parameters, unit.value_views, names, strict=True):
        is_there = p.data_ptr() == view.data_ptr() and p.dtype == view.dtype
        if not is_there or p.shape != view.shape or p.stride() != view.stride():
            raise RuntimeError(MOVED.format(name=name))


class DividedUnit(FlatUnit):
    """A unit of `fsdp`, whose parameters are stand-ins, or views of the values while these are.

    Attributes:
        names: of the parameters.
        is_shown: the parameters are views.
        was_called: code of a forward has run since then, and may have written to them.
    """

    def make_stand_ins(self, names: Sequence[str]) -> None:
        """Makes the parameters stand-ins; once, when the unit has its values."""
        self.names, self.is_shown, self.was_called = list(names), False, False
        for parameter in self.parameters:
            parameter.grad = None
        stale = self.parameters, self.names, self.values.dtype
        hide_all(*stale)
        weakref.finalize(self, hide_all, *stale).atexit = False  # once this has gone

    def show(self) -> None:
        """Makes the parameters views of the values, unless they are."""
        if not self.is_shown:
            self.is_shown = True
            reveal_all(self.parameters, self.value_views)
            self._versions = list(map(version_of, self.parameters))

    def hide(self) -> None:
        """Makes the parameters stand-ins, and this rank's slice what was written to them.

        Nothing counts what a forward writes through `.data`: behind it the values are compared.
        """
        if not self.is_shown:
            return
        refuse_moved(self, self.names)
        if self.was_called or self._versions != list(map(version_of, self.parameters)):
            from ddp.internals.kernels import take_written  # imports Triton

            take_written(self.own(self.values), self.shard)
        self.is_shown = self.was_called = False
        hide_all(self.parameters, self.names, self.values.dtype)

    @torch.no_grad()
    def keep(self, whole: Sequence[Tensor]) -> None:
        """Makes whole tensors the values of the parameters: this rank keeps what it owns."""
        for piece in self.pieces:
            piece.of(self.shard).copy_(piece.of_parameter(whole[piece.member].contiguous()))
