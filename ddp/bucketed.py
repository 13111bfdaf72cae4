"""`ddp_bucketed`: flat buckets whose slices *are* the gradients.

The problem that `ddp_individual_v2` leaves: a coalesced group is still one transfer a tensor
inside the library. One contiguous buffer is one transfer, at the full rate of the wire.

The idea: when a gradient is ready, copy it into its slice of a flat buffer, at once, while it is
still in the cache, and let `.grad` be a view of that slice. When the bucket is full, one all-reduce
averages the buffer. Nothing is copied back: the optimizer reads the views. Buckets leave in one
fixed order, the order in which gradients become ready, and the last ones are small, because they
cannot hide behind backward any more.

A flat buffer lives as long as its views. `zero_grad(set_to_none=True)` drops them, so the memory
goes back before the next forward needs it; with `set_to_none=False` the views stay, autograd adds
straight into the buffer, and the copy disappears.

What it leaves: overlap is nearly perfect and yet a step is slower than without communication. The
collective's kernels take multiprocessors and memory bandwidth from the model's own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.base import DataParallel
from ddp.buckets import Bucket, Gradient, mebibytes, plan_buckets


class BucketedDDP(DataParallel):
    """Flat buckets, one all-reduce each.

    Args:
        bucket_size_mb: a bucket's capacity in MiB; a larger gradient has its own.
    """

    def __init__(self, module: nn.Module, *, bucket_size_mb: float = 200, **options):
        self._bucket_bytes = mebibytes(bucket_size_mb)
        self._flat: dict[Bucket, Tensor] = {}
        super().__init__(module, **options)

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        self._flat.clear()  # the views of an earlier plan keep their buffers while they need them
        return plan_buckets(gradients, order, self._bucket_bytes)

    def before_forward(self) -> None:
        """Let go of buffers whose views `zero_grad(set_to_none=True)` has dropped."""
        for bucket in list(self._flat):
            if any(self._parameters_by_index[i].grad is None for i in bucket.members):
                del self._flat[bucket]

    def collect(self, i: int) -> None:
        bucket = self._buckets[self._bucket_of[i]]
        self.move(bucket, bucket.members.index(i))

    def launch(self, bucket: Bucket) -> dist.Work:
        flat = self.fill(bucket)
        self.count(collectives=1, nbytes=bucket.nbytes)
        return dist.all_reduce(flat, op=self.reduce_op, group=self.process_group, async_op=True)

    def wait(self, bucket: Bucket, handle: dist.Work) -> None:
        handle.wait()

    def fill(self, bucket: Bucket) -> Tensor:
        """Bring in what `collect` has not seen: zeros for members that are unused here."""
        for place in range(len(bucket.members)):
            self.move(bucket, place)
        return self.flat_buffer(bucket)

    def move(self, bucket: Bucket, place: int) -> None:
        """Make the gradient of the member at `place` a view of the flat buffer."""
        i, start = bucket.members[place], bucket.offsets[place]
        parameter = self._parameters_by_index[i]
        view = self.flat_buffer(bucket)[start : start + parameter.numel()].view(parameter.shape)
        if parameter.grad is None:
            self.stand_in(i, view.zero_())
        elif parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)

    def flat_buffer(self, bucket: Bucket) -> Tensor:
        if bucket not in self._flat:
            some = self._parameters_by_index[bucket.members[0]]
            self._flat[bucket] = torch.empty(bucket.numel, dtype=some.dtype, device=some.device)
        return self._flat[bucket]
