"""Exercise 1, average: data-parallel training that is right, if not yet fast.

What
    Every rank has a replica of the network and its own part of the batch. Before the first step all
    replicas must be equal. After every backward all must step with the same gradient: the mean of
    what the ranks computed.

        rank 0   forward  backward ▓▓▓▓▓▓▓▓            all-reduce ░░░░░░   optimizer
        rank 1   forward  backward ▓▓▓▓▓▓▓▓            all-reduce ░░░░░░   optimizer
                                           nothing is computed here ↑

Why it matters
    A network holds more than parameters. BatchNorm's running mean is a buffer. Replicas that begin
    with different buffers train without an error and evaluate differently on every rank. Most
    hand-built versions forget this.

You need
    torch.distributed.broadcast(tensor, src=0)   overwrites `tensor` with rank 0's, on every rank
    torch.distributed.all_reduce(tensor)         replaces `tensor` by its sum over the ranks
    module.parameters(), module.buffers()        `.grad` of a frozen parameter is None

Check it        ddp-exercise check average my_average.py
Benchmark it    ddp-benchmark --implementations none torch_ddp my_average.py:AverageDDP
Then read       ddp/synchronous.py, and ddp/internals/replicas.py
"""

import torch
import torch.distributed as dist  # noqa: F401 - you will need it
from torch import nn


class AverageDDP(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.make_replicas_equal()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def make_replicas_equal(self) -> None:
        """Gives every rank the values of rank 0."""
        raise NotImplementedError("broadcast from rank 0 everything that makes up the network")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("replace every gradient by its mean over the ranks")
