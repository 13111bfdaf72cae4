"""`ddp_bucketed`: flat buckets whose slices *are* the gradients.

The problem that `ddp_individual_v2` leaves: a coalesced group is still one transfer a tensor
inside the library. One contiguous buffer is one transfer, at the full rate of the wire.

The idea: when all gradients of a bucket are ready, copy them side by side into a flat buffer, let
each `.grad` be a view of its slice, and average the buffer with one all-reduce. Nothing is copied
back: the optimizer reads the views. Buckets leave in one fixed order, the order in which gradients
become ready, and the last ones are small, because they cannot hide behind backward any more.

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

    def __init__(self, module: nn.Module, *, bucket_size_mb: float = 100, **options):
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

    def launch(self, bucket: Bucket) -> dist.Work:
        flat = self.fill(bucket)
        self.count(collectives=1, nbytes=bucket.nbytes)
        return dist.all_reduce(flat, op=self.reduce_op, group=self.process_group, async_op=True)

    def wait(self, bucket: Bucket, handle: dist.Work) -> None:
        handle.wait()

    def fill(self, bucket: Bucket) -> Tensor:
        """Bring the members' gradients into the flat buffer and bind `.grad` to its slices."""
        flat = self.flat_buffer(bucket)
        sources, slices = [], []
        for i, view in zip(bucket.members, self.views(bucket, flat), strict=True):
            parameter = self._parameters_by_index[i]
            if parameter.grad is None:
                self.stand_in(i, view.zero_())
            elif parameter.grad.data_ptr() != view.data_ptr():
                sources.append(parameter.grad)
                slices.append(view)
                parameter.grad = view
        if sources:
            self.copy(slices, sources)
        return flat

    def flat_buffer(self, bucket: Bucket) -> Tensor:
        if bucket not in self._flat:
            some = self._parameters_by_index[bucket.members[0]]
            self._flat[bucket] = torch.empty(bucket.numel, dtype=some.dtype, device=some.device)
        return self._flat[bucket]

    def views(self, bucket: Bucket, flat: Tensor) -> list[Tensor]:
        parameters = [self._parameters_by_index[i] for i in bucket.members]
        return [
            flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(bucket.offsets, parameters, strict=True)
        ]

    def copy(self, slices: list[Tensor], sources: list[Tensor]) -> None:
        torch._foreach_copy_(slices, sources)
