"""`ddp_individual_v2`: launches ready gradients in groups, without copying them.

The problem with `ddp_individual`: hundreds of launches, each with its latency, and a
division that reads and writes every gradient once more before it is sent.

The idea: collect ready gradients until there are enough bytes of one dtype, then pass the whole
list to the communication library as one coalesced group, averaged inside the collective. The
library works on the gradients where they are: nothing is flattened, nothing is copied back.

What remains: the gradients of a group lie wherever the allocator put them, so the library runs
one ring per tensor within the group, and the number of launches it saves depends on the library.
"""

import torch.distributed as dist
from torch import nn

from ddp.base import DataParallel
from ddp.internals.interface import mebibytes
from ddp.schedule import Bucket
from ddp.torch_compat import coalesced_all_reduce


class IndividualV2DDP(DataParallel):
    """Reduces groups of gradients in place, with one coalesced all-reduce per group.

    Args:
        bucket_size_mb: a group is sent when its next gradient would exceed this many MiB; None for
            one group per dtype.
    """

    options = (*DataParallel.options, "bucket_size_mb")

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 200, **options):
        self.bucket_size_mb, self.bucket_bytes = bucket_size_mb, mebibytes(bucket_size_mb)
        super().__init__(module, **options)

    def launch(self, bucket: Bucket) -> dist.Work:
        # gloo writes from a thread of its own: versions of `.grad` shall tell of users alone.
        gradients = [self.gradient(i).data for i in bucket.members]
        return coalesced_all_reduce(gradients, self.reduction.op, self.process_group)
