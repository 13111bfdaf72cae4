"""Gradients of which each rank keeps a slice once they are reduced.

`.grad` is then a stand-in (stand_in.py): set to None or to zero, it clears the gradient as usual.
Before another backward adds to it, it becomes this rank's part of the gradient: the slice, and
zeros. So `.grad` alone tells what there is, and a second reduction is like the first one.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ddp.internals.gradients import Gradients, Reduction
from ddp.sharded.internals.stand_in import GradientStandIn, gradient_stand_in
from ddp.sharded.layout import FlatUnit
from ddp.sharded.slices import Piece, pieces_of
from ddp.sharded.torch_compat import copy_
from ddp.torch_compat import without_torch_functions


class DividedGradients(Gradients):
    """The gradients of parameters that lie in `units`.

    Attributes:
        pieces: what this rank owns of the parameters.
        reductions: number of reductions that were started, which all ranks start alike.
    """

    def __init__(self, module: nn.Module, reduction: Reduction, units: list[FlatUnit]):
        super().__init__(module, reduction)
        self.pieces = [piece for unit in units for piece in pieces_of(unit)]
        self.reductions = 0
        self._piece_of = {self.index_of(piece.parameter): piece for piece in self.pieces}
        self._unit_of: dict[int, FlatUnit] = {}
        for unit in units:
            unit.members = tuple(map(self.index_of, unit.parameters))
            self._unit_of |= dict.fromkeys(unit.members, unit)
        self._made: dict[int, GradientStandIn] = {}
        self._me = object()  # stand-ins have it, and do not keep slices alive

    def stand_in_for(self, i: int) -> GradientStandIn:
        """Returns what says in `.grad`: reduced, and not whole on this rank."""
        parameter, made = self.parameters[i], self._made.get(i)
        dtype = parameter.grad_dtype or parameter.dtype
        if made is None or made.dtype != dtype or made.is_cleared:
            self._made[i] = gradient_stand_in(parameter, dtype, self._me, self.names[i])
        return self._made[i]

    def not_reduced(self) -> str | None:
        """Returns the name of a parameter whose `.grad` stands for nothing reduced here, if any."""
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None and getattr(gradient, "owner", None) is not self._me:
                return self.names[i]
        return None

    def of(self, piece: Piece) -> Tensor | None:
        """Returns the reduced gradient of what this rank owns of a parameter, a view [numel]."""
        stand_in: Any = piece.parameter.grad
        if piece.unit.gradient is None or stand_in is None:
            return None
        own = piece.unit.gradient[piece.of_own]
        if stand_in.is_cleared:
            stand_in.is_cleared = False
            own.zero_()
        return own

    def share_of(self, i: int, held: Tensor) -> Tensor:
        """Returns this rank's part of a reduced gradient: what it owns of that, and zeros.

        It is in the slice's dtype, in which several backwards are to be added up.
        """
        if not isinstance(held, GradientStandIn):
            return super().share_of(i, held)
        parameter, piece = self.parameters[i], self._piece_of.get(i)
        reduced = self._unit_of[i].gradient
        assert reduced is not None  # as `held` says
        with without_torch_functions():
            own = None if piece is None else self.of(piece)
        dtype = torch.promote_types(self.dtypes.all[i], reduced.dtype)
        self.dtypes.widen(i, dtype)
        part = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        if piece is not None and own is not None:
            own = part.view(-1)[piece.of_whole].copy_(own)
            if self._reduction.name == "mean":
                own.mul_(self._reduction.contributors)
        return part

    def collect(self, unit: FlatUnit) -> Tensor:
        """Returns this rank's gradients of a unit, flat; a stand-in takes the place of each."""
        with without_torch_functions():
            found = []
            for i in unit.members:
                gradient = self.parameters[i].grad
                found.append(self.local(i) if gradient is None else gradient)
            dtypes = [self.dtypes.all[i] for i in unit.members]
            dtype = reduce(torch.promote_types, dtypes, unit.shard.dtype)
            flat = unit.shard.new_empty(unit.numel, dtype=dtype)
            copy_(unit.views(flat), found)
            unit.nbytes = sum([x.numel() for x in found]) * dtype.itemsize
            self.reductions += 1
            self.dtypes.narrow(unit.members)
            for i in unit.members:
                self.parameters[i].grad = self.stand_in_for(i)
        return flat
