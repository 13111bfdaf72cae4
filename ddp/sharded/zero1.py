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

import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp.base import DataParallel
from ddp.buckets import Gradient, plan_buckets
from ddp.internals.interface import mebibytes, trainable
from ddp.sharded.base import Sharded
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import all_gather


class Zero1DDP(Sharded):
    """Reduce-scatters flat buckets of gradients, steps a slice of each, gathers the parameters.

    Args:
        bucket_size_mb: as of `BucketedDDP`.
    """

    options = (*DataParallel.options, "bucket_size_mb")

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 200, **options):
        self.bucket_size_mb, self.bucket_bytes = bucket_size_mb, mebibytes(bucket_size_mb)
        self._gathers: list[dist.Work] = []
        super().__init__(module, **options)

    def divide(self) -> list[FlatUnit]:
        """Cuts the network once, because state belongs to slices: later plans order buckets."""
        parameters = trainable(self.module)
        sizes = [Gradient(p.numel(), str(p.dtype), p.element_size()) for p in parameters]
        buckets = plan_buckets(sizes, range(len(sizes))[::-1], self.bucket_bytes)
        return [FlatUnit([parameters[i] for i in b.members], self.process_group) for b in buckets]

    def publish(self, unit: FlatUnit) -> None:
        self.step.finished.count(unit.values.nbytes)
        self._gathers.append(all_gather(unit.values, unit.shard, self.process_group))

    def end_step(self, parameters: list[Parameter]) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()
        increment_version(parameters)  # a graph that has saved old values is refused
