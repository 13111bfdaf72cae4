"""The part of the optimizer's step that belongs to this rank's slices.

An ordinary optimizer steps this rank's pieces of a few units, and there are a few of these parts.
`optimizer.step()` steps one after another. When one has stepped, the model publishes the new values
of its units: `zero1` starts to gather them, so that their transfer runs beside the next one's step.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.sharded.layout import FlatUnit
from ddp.sharded.pieces import Piece

Settings = list[dict[str, Any]]
"""The options of each parameter group of the network's optimizer."""


class Part:
    """This rank's pieces of some units, and the optimizer that steps them.

    Args:
        number_of: the parameter group of each parameter of the network that is to be stepped.
        make: makes an optimizer from parameter groups.

    Attributes:
        pieces: of each, its unit and the parameter that is stepped: a view of this rank's slice.
            In the order of the optimizer's groups.
    """

    def __init__(
        self,
        units: list[FlatUnit],
        number_of: dict[Parameter, int],
        settings: Settings,
        make: Callable[..., Optimizer],
    ):
        self.units = units
        self.pieces: list[tuple[FlatUnit, Piece, Parameter]] = []
        groups: Settings = [{**options, "params": []} for options in settings]
        found = [(unit, piece) for unit in units for piece in unit.pieces]
        for number, group in enumerate(groups):
            for unit, piece in found:
                if number_of.get(unit.parameters[piece.member]) == number:
                    own = Parameter(piece.of(unit.shard))
                    own.grad_dtype = None  # any
                    group["params"].append(own)
                    self.pieces.append((unit, piece, own))
        self.optimizer = make(groups)

    def take(self, settings: Settings) -> None:
        """Takes the options of the groups, which a schedule may have changed."""
        for group, options in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(options)

    def step(
        self, settings: Settings, gradient_of: Callable[[FlatUnit, Piece], Tensor | None]
    ) -> None:
        self.take(settings)
        for unit, piece, own in self.pieces:
            gradient = gradient_of(unit, piece)
            own.grad = None if gradient is None else gradient.to(own.dtype)
        self.optimizer.step()
        for *_, own in self.pieces:
            own.grad = None
