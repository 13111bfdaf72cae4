"""`ddp_bucketed`: flat buckets whose slices *are* the gradients.

The problem with `ddp_individual_v2`: a coalesced group is still one transfer per
tensor inside the library. One contiguous buffer is one transfer, at the full rate of the wire.

The idea: when a gradient is ready, copy it into its slice of a flat buffer, at once, while it is
still in the cache, and let `.grad` be a view of that slice. When the bucket is full, one all-reduce
averages the buffer. Nothing is copied back: the optimizer reads the views.

A buffer lives as long as its views. `zero_grad(set_to_none=True)` drops them, before the next
forward; with `set_to_none=False` autograd adds straight into the buffer, and the copy disappears.

What remains: overlap is nearly perfect, and yet a step is slower than without communication,
because the collective's kernels take multiprocessors and memory bandwidth from the model's own.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from ddp.base import DataParallel
from ddp.internals.interface import mebibytes
from ddp.schedule import Bucket
from ddp.torch_compat import divide_first


@dataclass
class Flat:
    """A bucket's buffer [numel], and its members' slices of it, each in its parameter's shape."""

    buffer: Tensor
    slices: dict[int, Tensor]


class BucketedDDP(DataParallel):
    """Reduces flat buckets, whose slices are the gradients, with one all-reduce each.

    Args:
        bucket_size_mb: MiB of a bucket, or of a larger gradient alone; None for one per dtype.
    """

    options = (*DataParallel.options, "bucket_size_mb")

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 200, **options):
        self.bucket_size_mb, self.bucket_bytes = bucket_size_mb, mebibytes(bucket_size_mb)
        self.flats: dict[Bucket, Flat] = {}
        super().__init__(module, **options)

    def plan(self, order: list[int]) -> list[Bucket]:
        self.flats.clear()  # the views of an earlier plan keep their buffers while they need them
        return super().plan(order)

    def before_forward(self) -> None:
        """Frees buffers whose views `zero_grad(set_to_none=True)` has dropped."""
        for bucket in list(self.flats):
            if any([self.gradients.parameters[i].grad is None for i in bucket.members]):
                del self.flats[bucket]

    def collect(self, i: int) -> None:
        """Copies gradient `i`, or zeros if there is none, into its slice, and makes it that."""
        gradient, view = self.gradient(i), self.flat(self.schedule.bucket_of[i]).slices[i]
        if gradient.data_ptr() != view.data_ptr():
            self.gradients.parameters[i].grad = view.copy_(gradient)

    def launch(self, bucket: Bucket) -> dist.Work:
        buffer, group = self.fill(bucket), self.process_group
        op = divide_first(self.reduction.op, group, buffer)
        return dist.all_reduce(buffer, op=op, group=group, async_op=True)

    def fill(self, bucket: Bucket) -> Tensor:
        """Returns the buffer, in which those members are now too that were not ready."""
        flat = self.flat(bucket)
        for i, view in flat.slices.items():
            gradient = self.gradients.parameters[i].grad
            if gradient is None or gradient.data_ptr() != view.data_ptr():
                self.collect(i)
        return flat.buffer

    def flat(self, bucket: Bucket) -> Flat:
        if bucket not in self.flats:
            flat = self.flats[bucket] = Flat(self.allocate(bucket), {})
            for i, start in zip(bucket.members, bucket.offsets, strict=True):
                shape = self.gradients.parameters[i].shape
                flat.slices[i] = flat.buffer[start : start + shape.numel()].view(shape)
        return self.flats[bucket]

    def allocate(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's buffer, uninitialised."""
        dtype = self.gradients.dtypes.all[bucket.members[0]]
        return self.gradients.parameters[bucket.members[0]].new_empty(bucket.numel, dtype=dtype)
