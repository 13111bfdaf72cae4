"""The optimizer's step of this rank's slices.

An ordinary optimizer has this rank's pieces as its parameters, and passes over those without a
gradient. So `optimizer.step()` steps the pieces of a few units after those of others. When some
have been stepped, the model publishes the new values of their units: `zero1` starts to gather them,
so that their transfer runs beside the step of the next ones.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.sharded.layout import FlatUnit, Piece

Settings = list[dict[str, Any]]
"""The options of each parameter group of the network's optimizer."""


class Slices:
    """This rank's pieces of some units, and the optimizer that steps them.

    Args:
        number_of: the parameter group of each parameter of the network that is to be stepped.
        make: makes an optimizer from parameter groups.

    Attributes:
        stepped: of each piece what is stepped, a view of this rank's slice of its unit; in the
            order of the optimizer's groups.
    """

    def __init__(
        self,
        units: list[FlatUnit],
        number_of: dict[Parameter, int],
        settings: Settings,
        make: Callable[..., Optimizer],
    ):
        found = [(unit, piece) for unit in units for piece in unit.pieces]
        found = [(unit, piece) for unit, piece in found if piece.parameter in number_of]
        self.stepped: dict[Piece, Parameter] = {}
        groups: Settings = [{**options, "params": []} for options in settings]
        for unit, piece in sorted(found, key=lambda pair: number_of[pair[1].parameter]):
            own = self.stepped[piece] = Parameter(piece.of(unit.shard))
            own.grad_dtype = None  # any
            groups[number_of[piece.parameter]]["params"].append(own)
        self.optimizer = make(groups)

    def take(self, settings: Settings) -> None:
        """Takes the options of the groups, which a schedule may have changed."""
        for group, options in zip(self.optimizer.param_groups, settings, strict=True):
            members = group["params"]
            group.clear()  # also of what a step of other units has noted, as their number
            group.update(options, params=members)

    def step(
        self,
        units: list[FlatUnit],
        settings: Settings,
        gradient_of: Callable[[FlatUnit, Piece], Tensor | None],
    ) -> None:
        self.take(settings)
        try:
            for unit in units:
                for piece in unit.pieces:
                    if (own := self.stepped.get(piece)) is not None:
                        gradient = gradient_of(unit, piece)
                        own.grad = None if gradient is None else gradient.to(own.dtype)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
