"""The base of the sharded variants: gradients are reduced into slices, of which a rank has one.

Parameters lie together in units (layout.py). A bucket is a unit's gradients: copied to a flat
buffer once the last of them is ready, and reduce-scattered, so that each rank gets the sums of its
slice. In `.grad` a stand-in of NaN says so from then on (internals/gradients.py).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.schedule import Bucket
from ddp.sharded.internals.interface import ShardedInterface
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import reduce_scatter


class Sharded(ShardedInterface):
    """A network of which each rank reduces, and steps, its slices. A variant says what is whole."""

    frees_gradients = False  # True: a reduced slice is a tensor of its own, and the rest is freed

    def divide(self) -> list[FlatUnit]:
        """Returns the trainable parameters in units; called once, at construction."""
        raise NotImplementedError

    def plan(self, order: list[int]) -> list[Bucket]:
        """Returns the units in the order in which the last gradients of each come."""
        place = {i: place for place, i in enumerate(order)}
        return sorted(self.units, key=lambda unit: max(place[i] for i in unit.members))

    def launch(self, unit: Any) -> tuple[dist.Work, Tensor, Tensor]:
        flat = self.gradients.collect(unit)
        own = torch.empty_like(unit.own(flat)) if self.frees_gradients else unit.own(flat)
        return reduce_scatter(own, flat, self.reduction.op, self.process_group), own, flat

    def wait(self, unit: Any, handle: tuple[dist.Work, Tensor, Any]) -> None:
        work, own, _ = handle  # the collective reads the flat buffer until now
        work.wait()
        unit.gradient = own
