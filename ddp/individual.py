"""`ddp_individual`: starts each gradient's all-reduce as soon as it is accumulated.

The problem with `ddp`: the last layer's gradient is ready when backward has barely begun, but
it is not communicated before all the others are ready, too.

The idea: autograd calls a hook when a parameter's gradient has been accumulated. The hook divides
it, starts an asynchronous all-reduce and returns at once, so the transfer runs beside the rest of
backward. `finish_gradient_synchronization` waits for the handles. A float16 sum may overflow where
the mean does not, so the division comes first.

What remains: one collective per parameter. A norm's weight of a few kilobytes takes the same
latency as a matrix of many megabytes, and the division is one more pass over every gradient.
"""

import torch.distributed as dist

from ddp.base import DataParallel
from ddp.schedule import Bucket


class IndividualDDP(DataParallel):
    """Launches one asynchronous all-reduce per parameter, in the agreed order, during backward."""

    def launch(self, bucket: Bucket) -> dist.Work:
        (i,) = bucket.members
        gradient = self.gradient(i)
        if self.reduction.name == "mean":
            gradient.div_(self.world_size)
        return dist.all_reduce(
            gradient, op=dist.ReduceOp.SUM, group=self.process_group, async_op=True
        )
