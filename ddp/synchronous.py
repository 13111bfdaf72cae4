"""`ddp`: all-reduces every gradient after backward, blocking.

The problem: each rank has the gradient of its own shard of the batch, and all must step with the
mean of all shards.

The idea: when backward is over, visit the parameters in the same order on every rank, divide each
gradient by the number of ranks and sum it over them. `NaiveDDP` is all of it. `SynchronousDDP` does
the same on the common base (base.py), as every further step of the course does: ranks with
different models are refused, a parameter without a gradient is named, buffers stay equal, several
backwards may precede one finish.

What remains: no GPU computes while gradients are communicated, and none are communicated
during backward. The picture shows one long bar of communication after the end of backward.
"""

import torch.distributed as dist
from torch import nn

from ddp.base import DataParallel
from ddp.schedule import Bucket


class NaiveDDP(nn.Module):
    """The whole of `ddp` in 16 lines. Use it by `wrap("ddp/synchronous.py:NaiveDDP", module)`."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad.div_(dist.get_world_size())
                dist.all_reduce(parameter.grad)


class SynchronousDDP(DataParallel):
    """One blocking all-reduce per parameter, all of them in `finish_gradient_synchronization`."""

    launches_in_backward = False

    def launch(self, bucket: Bucket) -> None:
        (i,) = bucket.members
        gradient = self.gradient(i)
        if self.reduction.name == "mean":
            gradient.div_(self.world_size)  # first: a float16 sum may overflow where no mean does
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=self.process_group)

    def wait(self, bucket: Bucket, handle: None) -> None:
        """Does nothing: `launch` blocks until the gradients are reduced."""
