"""`ddp`: all-reduce every gradient after backward, blocking.

The problem: each rank has the gradient of its own shard of the batch, and all must step with the
mean of all shards.

The idea: when backward is over, visit the parameters in the same order on every rank, sum each
gradient over the ranks and divide by their number. It is right and it is simple.

What it leaves: nothing is computed while gradients travel and nothing travels while gradients are
computed. Look for it in the picture: one long bar of communication after the end of backward.
"""

import torch.distributed as dist

from ddp.base import DataParallel
from ddp.buckets import Bucket


class SynchronousDDP(DataParallel):
    """One blocking all-reduce a parameter, all of them in `finish_gradient_synchronization`."""

    launches_in_backward = False

    def launch(self, bucket: Bucket) -> None:
        for i in bucket.members:
            gradient = self.gradient(i)
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=self.process_group)
            self.count(collectives=1, nbytes=gradient.nbytes)
            if self.reduce == "mean":
                gradient.div_(self.world_size)

    def wait(self, bucket: Bucket, handle: None) -> None:
        """Nothing is under way: each launch returned when its values were there."""
