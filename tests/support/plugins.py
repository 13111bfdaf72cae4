"""Data-parallel variants of a learner's own: one that is right, and all the ways of being wrong.

Most are no subclasses of `ddp.DataParallel`: the benchmark asks for three methods only, except for
private training. What goes wrong does so on rank 1, in the middle of the backward pass of step 3,
which the timed rounds have and the gate has not.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.buckets import Bucket
from ddp.diloco import DilocoDDP
from ddp.synchronous import SynchronousDDP

FATAL_STEP = 3


class Minimal(nn.Module):
    """The least that is data parallel."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.steps = 0
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        last = next(iter(module.parameters()))  # the embedding: last to get its gradient
        last.register_post_accumulate_grad_hook(self._in_backward)

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        return self.module(tokens)

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def _in_backward(self, _parameter: Tensor) -> None:
        if self.steps == FATAL_STEP and dist.get_rank() == 1:
            self.misbehave()

    def misbehave(self) -> None:
        """The right one does not."""


class Forgetful(Minimal):
    """Sums and does not divide."""

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)


class Poisonous(Minimal):
    """Gradients that are no numbers."""

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad.fill_(torch.nan)


class Raising(Minimal):
    def misbehave(self) -> None:
        raise KeyError("no bucket of that name")


class Hungry(Minimal):
    def misbehave(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Sleepy(Minimal):
    def misbehave(self) -> None:
        time.sleep(1000)


class Killed(Minimal):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(Minimal):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Averaging(SynchronousDDP):
    """Right in ordinary training. Asked for sums, it divides by the number of ranks as well."""

    def launch(self, bucket: Bucket) -> None:
        super().launch(bucket)
        if self.reduce == "sum":
            for i in bucket.members:
                self.gradient(i).div_(self.world_size)


class Uphill(DilocoDDP):
    """Its outer step goes in the wrong direction."""

    def wait(self, bucket, handle):
        work, flat = handle
        work.wait()
        for delta in flat.slices.values():
            delta.neg_()
        super().wait(bucket, handle)
