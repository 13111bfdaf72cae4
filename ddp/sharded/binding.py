"""Parameters that are views of flat buffers, and what is this rank's of their reduced gradients."""

import torch
from torch import Tensor

from ddp.internals.gradients import Reduction
from ddp.sharded.layout import FlatUnit

RESHAPED = (
    "a parameter of shape {then} has been given the shape {now}: wrap the network anew, and make "
    "another optimizer"
)


class ShardReduction(Reduction):
    """Knows where reduced gradients are. Each rank's part of one is what it owns of it."""

    place_of: dict[int, tuple[FlatUnit, int]]

    def share_of(self, i: int, reduced: Tensor) -> Tensor:
        unit, member = self.place_of[i]
        if not unit.is_stand_in(reduced):  # assigned by a user, the same on every rank
            return super().share_of(i, reduced)
        whole = unit.own_gradient_behind(reduced, member)
        return whole.mul_(self.contributors) if self.name == "mean" else whole


@torch.no_grad()
def bind(units: list[FlatUnit]) -> None:
    """Makes every parameter a view of its flat buffer, with the value that it has now.

    All values are read before the first one is written: parameters may have been exchanged.

    Raises:
        RuntimeError: for a parameter that has another shape than when it was wrapped.
    """
    moved = []
    for unit in units:
        start, itemsize = unit.values.data_ptr(), unit.values.element_size()
        for member, offset in enumerate(unit.layout.offsets):
            parameter, place = unit.parameters[member], start + offset * itemsize
            if parameter.shape != (shape := unit.layout.shapes[member]):
                raise RuntimeError(RESHAPED.format(now=[*parameter.shape], then=[*shape]))
            lies_there = parameter.data_ptr() == place and parameter.is_contiguous()
            if not lies_there and parameter.numel():
                moved.append((unit, member, parameter.detach().clone()))
    for unit, member, value in moved:
        view = unit.layout.views(unit.values)[member]
        unit.parameters[member].data = view.copy_(value)
