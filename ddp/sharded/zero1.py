"""`zero1`: each rank keeps the optimizer's state of its own slice, and steps that alone.

The problem with `ddp_bucketed`: every rank holds the same optimizer state, for Adam twice the
parameters, and computes the same step from it. An all-reduce has two halves, a reduce-scatter (each
rank gets the sums of one slice) and an all-gather (each rank gets all slices). Nothing requires
that the optimizer wait for the second one.

The idea (ZeRO stage 1, https://arxiv.org/abs/1910.02054): reduce-scatter each bucket when it is
full, step the own slice, then gather the *parameters*. The bytes on the wire are those of an
all-reduce; state and step are 1/W. Parameters are views of flat buffers that lie as the buckets do,
so the gather writes them in place, and it runs beside the step of the next bucket.

After the reduction, `.grad` is no whole gradient: it is a stand-in of NaN (layout.py).

What remains: a bucket's gradients stay allocated, though only 1/W of them is used any more.
"""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp.bucketed import BucketedDDP
from ddp.buckets import Bucket, Gradient, plan_buckets
from ddp.internals.gradients import Reduction
from ddp.sharded.interface import Sharded, ShardReduction
from ddp.sharded.layout import FlatUnit, bind
from ddp.torch_compat import all_gather


class Zero1DDP(Sharded, BucketedDDP):
    """Reduce-scatters flat buckets of gradients, steps a slice of each, gathers the parameters.

    Parameters become contiguous views of flat buffers.

    Args:
        bucket_size_mb: a bucket's capacity in MiB, a larger gradient has its own; None for one
            bucket per dtype.
    """

    reduction: ShardReduction

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 200, **options):
        self.units: list[FlatUnit] = []
        self._unit_of: dict[tuple[int, ...], FlatUnit] = {}
        self._gathers: list[dist.Work] = []
        super().__init__(module, bucket_size_mb=bucket_size_mb, **options)

    def make_reduction(self, name: str) -> Reduction:
        return ShardReduction(name, self.world_size)

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        """Divides the network once, because state belongs to slices; then only orders buckets."""
        self.flats.clear()
        if not self.units:
            self._divide(gradients, order)
        position = {i: place for place, i in enumerate(order)}
        buckets = []
        for members, unit in self._unit_of.items():
            self._convert(unit, members)
            nbytes = sum(gradients[i].nbytes for i in members)
            buckets.append(Bucket(members, unit.layout.offsets, unit.layout.numel, nbytes))
        return sorted(buckets, key=lambda bucket: max(position[i] for i in bucket.members))

    def launch(self, bucket: Bucket) -> dist.Work:
        buffer, unit = self.fill(bucket), self._unit_of[bucket.members]
        own = self.receiver(unit.layout.slice_of(buffer, unit.rank))
        unit.gradient = own  # once the collective has finished
        return self.reduce_slices(own, buffer)

    def wait(self, bucket: Bucket, handle: dist.Work) -> None:
        handle.wait()
        unit = self._unit_of[bucket.members]
        self.average(unit.gradient)
        for i, stand_in in zip(bucket.members, unit.stand_ins(), strict=True):
            if i in self.gradients.stand_ins:
                self.gradients.stand_ins[i] = stand_in
            elif self.gradients.parameters[i].grad is not None:
                self.gradients.parameters[i].grad = stand_in

    def receiver(self, own: Tensor) -> Tensor:
        """Returns where the reduced slice goes: in place, into this rank's slice of the bucket."""
        return own

    def deactivate(self) -> None:
        """Leaves gradients as this rank's part, which another wrapper of the network can reduce."""
        self.wait_for(*self.schedule.in_flight)
        self.gradients.make_local(*self.gradients.reduced)
        super().deactivate()

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

    # ---- how the network is divided ------------------------------------------------------------

    def _divide(self, gradients: list[Gradient], order: list[int]) -> None:
        parameters = self.gradients.parameters
        by_both_dtypes = [
            replace(gradient, dtype=f"{gradient.dtype} of {p.dtype}")
            for gradient, p in zip(gradients, parameters, strict=True)
        ]
        place_of: dict[int, tuple[FlatUnit, int]] = {}
        for bucket in plan_buckets(by_both_dtypes, order, self.bucket_bytes):
            unit = FlatUnit([parameters[i] for i in bucket.members], self.process_group)
            unit.values = unit.flatten()
            unit.shard = unit.layout.slice_of(unit.values, unit.rank)
            for view, parameter in zip(
                unit.layout.views(unit.values), unit.parameters, strict=True
            ):
                parameter.data = view
            self.units.append(unit)
            self._unit_of[bucket.members] = unit
            place_of |= {i: (unit, member) for member, i in enumerate(bucket.members)}
        self.reduction.place_of = place_of

    def _convert(self, unit: FlatUnit, members: tuple[int, ...]) -> None:
        """Converts reduced gradients after a change of `gradient_dtype`."""
        dtype = self.gradients.dtypes.all[members[0]]
        if unit.gradient is None or unit.gradient.dtype == dtype:
            return
        for i, stand_in in zip(members, unit.cast_gradient(dtype), strict=True):
            if i in self.gradients.reduced and self.gradients.parameters[i].grad is not None:
                self.gradients.parameters[i].grad = stand_in
