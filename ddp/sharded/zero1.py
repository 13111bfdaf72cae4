"""`zero1`: each rank keeps the optimizer's state of its own slice, and steps that alone.

The problem with `ddp_bucketed`: every rank holds the same optimizer state, for Adam twice the
parameters, and computes the same step from it. An all-reduce has two halves, a reduce-scatter (each
rank gets the sums of one slice) and an all-gather (each rank gets all slices). Nothing requires
that the optimizer wait for the second one.

The idea (ZeRO stage 1, https://arxiv.org/abs/1910.02054): reduce-scatter each bucket when it is
full, step the own slice, then gather the *parameters*. The bytes on the wire are those of an
all-reduce; state and step are 1/W. Parameters are views of flat buffers that lie as the buckets do,
so the gather writes them in place, and it runs beside the step of the next bucket.

What remains: a bucket's gradients stay allocated, though only 1/W of them is used any more.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp.base import DataParallel
from ddp.buckets import plan_buckets
from ddp.internals.gradients import Gradients
from ddp.internals.options import mebibytes
from ddp.sharded.base import Sharded
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import all_gather


class Zero1DDP(Sharded):
    """Reduce-scatters flat buckets of gradients, steps a slice of each, gathers the parameters.

    Parameters become contiguous views of flat buffers.

    Args:
        bucket_size_mb: a bucket's capacity in MiB, a larger gradient has its own; None for one
            bucket per dtype.
    """

    options = (*DataParallel.options, "bucket_size_mb")

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 200, **options):
        self.bucket_size_mb, self.bucket_bytes = bucket_size_mb, mebibytes(bucket_size_mb)
        self._gathers: list[dist.Work] = []
        super().__init__(module, **options)

    def divide(self) -> list[FlatUnit]:
        """Cuts the network once, because state belongs to slices: later plans order buckets."""
        gradients = Gradients(self.module, self.reduction)
        by_both_dtypes = [
            replace(gradient, dtype=f"{gradient.dtype} of {p.dtype}")
            for gradient, p in zip(gradients.describe(), gradients.parameters, strict=True)
        ]
        order = [*reversed(range(len(by_both_dtypes)))]
        units = []
        for bucket in plan_buckets(by_both_dtypes, order, self.bucket_bytes):
            unit = FlatUnit([gradients.parameters[i] for i in bucket.members], self.process_group)
            unit.values = unit.flatten()
            unit.shard = unit.own(unit.values)
            for parameter, view in zip(unit.parameters, unit.views(unit.values), strict=True):
                parameter.data = view
            units.append(unit)
        return units

    def receiver(self, flat: Tensor, own: Tensor) -> Tensor:
        return own

    # ---- the step, as ShardedOptimizer calls it ------------------------------------------------

    def begin_step(self, units: list[FlatUnit]) -> None:
        bind(units)  # another wrapper of the same network may have moved them

    def publish(self, unit: FlatUnit) -> None:
        self.step.finished.collectives += 1
        self.step.finished.nbytes += unit.values.nbytes
        self._gathers.append(all_gather(unit.values, unit.shard, self.process_group))

    def end_step(self, parameters: list[Parameter]) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()
        increment_version(parameters)  # a graph that has saved old values is refused

    def deactivate(self) -> None:
        self.wait_for(*self.schedule.in_flight)
        self.gradients.hand_over(self.world_size if self.reduction.name == "mean" else 1)
        super().deactivate()


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
        for member, offset in enumerate(unit.offsets):
            parameter, place = unit.parameters[member], start + offset * itemsize
            if parameter.shape != (shape := unit.shapes[member]):
                raise RuntimeError(
                    f"a parameter of shape {[*shape]} has been given the shape "
                    f"{[*parameter.shape]}: wrap the network anew, and make another optimizer"
                )
            lies_there = parameter.data_ptr() == place and parameter.is_contiguous()
            if not lies_there and parameter.numel():
                moved.append((unit, member, parameter.detach().clone()))
    for unit, member, value in moved:
        view = unit.views(unit.values)[member]
        unit.parameters[member].data = view.copy_(value)
