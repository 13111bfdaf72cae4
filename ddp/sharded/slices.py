"""Finds what a rank owns of each parameter, and steps it.

Slices are cut without regard to parameters: one may lie on several ranks, and a rank owns at most
one run of its elements, a `Piece`. Everything that a rank does with its part (step, noise,
checkpoints) goes through its pieces; the padding between them is never read.

An ordinary optimizer has this rank's pieces as its parameters, and passes over those without a
gradient. So it can step the pieces of some units after those of others. Between the two the model
publishes the new values: `zero1` starts to gather them, beside the step of the next units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.sharded.layout import FlatUnit

Groups = list[dict[str, Any]]  # of parameters, whose options a schedule changes


@dataclass(eq=False)
class Piece:
    """Says where a rank's elements of a parameter are: in the flattened parameter, and in `own`.

    `whole.view(-1)[piece.of_whole]` and `own[piece.of_own]` are views of the same elements.
    """

    unit: FlatUnit
    parameter: Parameter
    of_whole: slice
    of_own: slice


def pieces_of(unit: FlatUnit) -> list[Piece]:
    """Returns what this rank owns of a unit's parameters, in their order."""
    owned, low = [], unit.rank * unit.slice_numel
    for parameter, first in zip(unit.parameters, unit.offsets, strict=True):
        begin, end = max(low, first), min(low + unit.slice_numel, first + parameter.numel())
        if begin < end or (unit.rank == 0 and parameter.numel() == 0):  # somebody has its state
            of_whole, of_own = slice(begin - first, end - first), slice(begin - low, end - low)
            owned.append(Piece(unit, parameter, of_whole, of_own))
    return owned


class Slices:
    """This rank's pieces of some units, and the optimizer that steps them.

    Attributes:
        stepped: a view of each piece, which the optimizer steps; in the order of its groups.
    """

    def __init__(self, units: list[FlatUnit], groups: Groups, make: Callable[[Groups], Optimizer]):
        owned = {piece.parameter: piece for unit in units for piece in pieces_of(unit)}
        self.stepped: dict[Piece, Parameter] = {}
        own_groups: Groups = []
        for group in groups:
            mine = [owned[p] for p in group["params"] if p in owned]
            own = {piece: Parameter(piece.unit.shard[piece.of_own]) for piece in mine}
            own_groups.append({**options_of(group), "params": list(own.values())})
            self.stepped |= own
        self.optimizer = make(own_groups)

    def step(self, units: set[FlatUnit], gradient_of: Callable[[Piece], Tensor | None]) -> None:
        """Steps the pieces of some units."""
        try:
            for piece, own in self.stepped.items():
                if piece.unit in units and (gradient := gradient_of(piece)) is not None:
                    own.grad = gradient.to(own.dtype)
            self.optimizer.step()
        finally:
            for own in self.stepped.values():
                own.grad = None


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns what a group has beside its parameters, of which every rank has its own part."""
    return {key: x for key, x in group.items() if key not in ("params", "param_names")}
