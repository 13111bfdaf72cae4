"""Gradients of which each rank keeps a slice once they are reduced.

`.grad` is then a stand-in (stand_in.py): set to None or to zero, it clears the gradient as usual.
Another backward begins with an empty `.grad`, and what it brings is reduced and added to the slice
that is kept. So a sum in 16 bits is added up in the slice's wider type.
"""

from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.internals.gradients import Gradients, Reduction
from ddp.sharded.internals.stand_in import StandIn
from ddp.sharded.layout import FlatUnit
from ddp.sharded.pieces import Piece
from ddp.sharded.torch_compat import copy_
from ddp.torch_compat import version_of


class DividedGradients(Gradients):
    """The gradients of parameters that lie in `units`.

    Attributes:
        can_average: the backend's reduce-scatter can; that of gloo only sums.
        reductions: number of reductions that were started, which all ranks start alike.
        kept: gradients whose reduced value the next one is added to, and whether the stand-in was
            in `.grad`; else this rank had none, and it stood for the others'.
    """

    def __init__(
        self,
        module: nn.Module,
        reduction: Reduction,
        units: list[FlatUnit],
        group: dist.ProcessGroup,
    ):
        super().__init__(module, reduction)
        self.units = units
        for unit in units:
            unit.members = tuple(map(self.index_of, unit.parameters))
        self.can_average = dist.get_backend(group) == dist.Backend.NCCL
        self.reductions = 0
        self.kept: dict[int, bool] = {}
        self._begun: set[int] = set()  # of those, the ones that backward is about to add to
        self._made: dict[int, StandIn] = {}

    # ---- stand-ins -----------------------------------------------------------------------------

    def stand_ins_for(self, *indices: int) -> list[Tensor]:
        """Returns what says in `.grad`: reduced, and not whole on this rank.

        It has the parameter's shape, takes the memory of one element, and is NaN. So code that
        takes it for the whole gradient gets NaN, never values of which only some are reduced.
        """
        for i in indices:
            parameter, known = self.parameters[i], self._made.get(i)
            dtype = parameter.grad_dtype or parameter.dtype
            if known is None or known.dtype != dtype or version_of(known):
                one = torch.full((), torch.nan, dtype=dtype, device=parameter.device)
                self._made[i] = one.expand(parameter.shape).as_subclass(StandIn)
        return [self._made[i] for i in indices]

    def not_reduced(self) -> Parameter | None:
        """Returns a parameter whose `.grad` stands for nothing that was reduced here, if any."""
        for i, parameter in enumerate(self.parameters):
            gradient, known = parameter.grad, self._made.get(i)
            if gradient is None:
                continue
            if not isinstance(gradient, StandIn) or known is None:
                return parameter
            if gradient.untyped_storage().data_ptr() != known.untyped_storage().data_ptr():
                return parameter
        return None

    def of(self, unit: FlatUnit, piece: Piece) -> Tensor | None:
        """Returns the reduced gradient of what this rank owns of a parameter, a view [numel]."""
        stand_in = unit.parameters[piece.member].grad
        if unit.gradient is None or stand_in is None:
            return None
        own = piece.of(unit.gradient)
        return _cleared(own, stand_in) if version_of(stand_in) else own

    # ---- before and behind a backward, and a reduction -----------------------------------------

    def make_local(self, *indices: int) -> None:
        """Leaves stand-ins as they are: what is reduced next is added to what they stand for."""
        self.dtypes.conform(*indices)
        held = {i: self.stand_ins.get(i, self.parameters[i].grad) for i in indices}
        if others := [i for i in indices if not isinstance(held[i], StandIn)]:
            super().make_local(*others)

    def begin_accumulation(self, i: int) -> None:
        """Takes a stand-in out of `.grad`, to which backward is about to add."""
        self._take_stand_in_away(i)
        if i in self.kept:
            self._begun.add(i)

    def end_accumulation(self, i: int) -> None:
        """Forgets a kept gradient if `.grad` was None before this backward: it was cleared."""
        if i not in self._begun:
            self.kept.pop(i, None)
        elif self.parameters[i].grad is None and i in self.kept:  # backward has brought None
            (stand_in,) = self.stand_ins_for(i)
            if self.kept.pop(i):
                self.parameters[i].grad = stand_in
            else:
                self.stand_ins[i] = stand_in
        self._begun.discard(i)

    def drop(self) -> None:
        super().drop()
        self.kept.clear()
        self._begun.clear()

    def collect(self, unit: FlatUnit, flat: Tensor) -> None:
        """Copies this rank's gradients of a unit to `flat`; a stand-in takes the place of each."""
        found, absent = [], set()
        for i in unit.members:
            gradient = self.parameters[i].grad
            if gradient is None:
                absent.add(i)
            if gradient is None or isinstance(gradient, StandIn):
                self._take_stand_in_away(i)
                gradient = self.local(i)  # zero
            found.append(gradient)
        copy_(unit.views(flat), found)
        for i, stand_in in zip(unit.members, self.stand_ins_for(*unit.members), strict=True):
            if i in absent:
                self.stand_ins[i] = stand_in
            else:
                self.stand_ins.pop(i, None)  # of what was reduced before, and no more
                self.parameters[i].grad = stand_in

    def add(self, unit: FlatUnit, own: Tensor) -> None:
        """Makes `own` the reduced gradients of a unit, added to what is kept."""
        before = unit.gradient
        for piece in unit.pieces if self.kept else ():
            if before is not None and unit.members[piece.member] in self.kept:
                piece.of(own).add_(piece.of(before))
        for i in unit.members:
            self.kept.pop(i, None)
        unit.gradient = own

    def _take_stand_in_away(self, i: int) -> None:
        gradient = self.stand_ins.get(i, self.parameters[i].grad)
        if isinstance(gradient, StandIn):
            self.kept.pop(i, None)
            if not version_of(gradient):  # else zero_grad(set_to_none=False) has cleared it
                self.kept[i] = i not in self.stand_ins
            self.stand_ins.pop(i, None)
            self.parameters[i].grad = None
        elif gradient is None:
            self.kept.pop(i, None)

    # ---- between steps -------------------------------------------------------------------------

    def reduced_in(self, unit: FlatUnit) -> torch.dtype:
        """Returns the widest dtype of a unit's slices and gradients."""
        return reduce(
            torch.promote_types, [self.dtypes.all[i] for i in unit.members], unit.shard.dtype
        )

    def convert(self) -> None:
        """Converts reduced gradients after a change of `gradient_dtype`."""
        for unit in self.units:
            if unit.gradient is None:
                continue
            for piece in unit.pieces:  # a converted stand-in does not tell that it was zeroed
                if (stand_in := unit.parameters[piece.member].grad) is not None:
                    _cleared(piece.of(unit.gradient), stand_in)
            unit.gradient = unit.gradient.to(self.reduced_in(unit))
            for i, stand_in in zip(unit.members, self.stand_ins_for(*unit.members), strict=True):
                if isinstance(self.parameters[i].grad, StandIn):
                    self.parameters[i].grad = stand_in

    def free_cleared(self) -> None:
        """Frees slices of gradients that `zero_grad(set_to_none=True)` has cleared."""
        for unit in self.units:
            grads = [self.stand_ins.get(i, self.parameters[i].grad) for i in unit.members]
            if not any(gradient is not None for gradient in grads):
                unit.gradient = None

    def hand_over(self, scale: float) -> None:
        """Makes each `.grad` this rank's part of the gradient, for another wrapper to reduce."""
        for unit in self.units:
            piece_of = {piece.member: piece for piece in unit.pieces}
            for member, i in enumerate(unit.members):
                parameter, is_reduced = self.parameters[i], i not in self.kept
                if is_reduced and not isinstance(parameter.grad, StandIn):
                    continue
                part = torch.zeros_like(parameter, dtype=self.dtypes.all[i]).detach()
                if (piece := piece_of.get(member)) and (own := self.of(unit, piece)) is not None:
                    piece.of_parameter(part).copy_(own).mul_(scale)
                if not is_reduced and parameter.grad is not None:
                    part.add_(parameter.grad)
                parameter.grad = part
        self.kept.clear()
        self.reduced.clear()


def _cleared(own: Tensor, stand_in: Tensor) -> Tensor:
    """Returns a piece of the gradient, made zero if the stand-in was, without waiting for a GPU.

    It is NaN where another number was written to the stand-in, of one element.
    """
    mark = stand_in.as_strided((), ())
    own.masked_fill_(mark == 0, 0)
    return own.masked_fill_((mark == mark) & (mark != 0), torch.nan)
