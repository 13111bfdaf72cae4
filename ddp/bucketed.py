"""`ddp_bucketed`: flat buckets whose slices *are* the gradients.

The problem with `ddp_individual_v2`: a coalesced group is still one transfer per
tensor inside the library. One contiguous buffer is one transfer, at the full rate of the wire.

The idea: when a gradient is ready, copy it into its slice of a flat buffer, at once, while it is
still in the cache, and let `.grad` be a view of that slice. When the bucket is full, one all-reduce
averages the buffer. Nothing is copied back: the optimizer reads the views. Buckets are launched
in one fixed order, that in which gradients become ready. The last ones are small, because backward
cannot hide their communication any more.

A flat buffer lives as long as its views. `zero_grad(set_to_none=True)` drops them, so the memory
goes back before the next forward needs it; with `set_to_none=False` the views stay, autograd adds
straight into the buffer, and the copy disappears.

What remains: overlap is nearly perfect, and yet a step is slower than without communication,
because the collective's kernels take multiprocessors and memory bandwidth from the model's own.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.buckets import Bucket, Gradient, mebibytes
from ddp.sparse_embeddings import SparseEmbeddings


@dataclass(frozen=True)
class Flat:
    """A bucket's buffer [numel], and its members' slices of it, each in its parameter's shape."""

    buffer: Tensor
    slices: list[Tensor]


class BucketedDDP(SparseEmbeddings):
    """Reduces flat buckets, whose slices are the gradients, with one all-reduce each.

    Args:
        bucket_size_mb: a bucket's capacity in MiB, a larger gradient has its own; None for one
            bucket per dtype.
        sparse_embeddings: exchange the used rows of an embedding's gradient alone.
    """

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 200, **options):
        self._bucket_bytes = mebibytes(bucket_size_mb)
        self._flats: dict[Bucket, Flat] = {}
        super().__init__(module, **options)

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        self._flats.clear()  # the views of an earlier plan keep their buffers while they need them
        return self.plan_with_embeddings(gradients, order, self._bucket_bytes)

    def before_forward(self) -> None:
        """Frees buffers whose views `zero_grad(set_to_none=True)` has dropped."""
        for bucket in list(self._flats):
            if any(self.gradients.parameters[i].grad is None for i in bucket.members):
                del self._flats[bucket]

    def collect(self, i: int) -> None:
        if self.may_be_sparse(i):
            return
        bucket = self.schedule.bucket_of[i]
        self._move(i, self._flat(bucket).slices[bucket.members.index(i)])

    def launch(self, bucket: Bucket) -> dist.Work:
        buffer, nbytes = self.pack_or_fill(bucket)
        self.count(collectives=1, nbytes=nbytes)
        return dist.all_reduce(
            buffer, op=self.reduction.op, group=self.process_group, async_op=True
        )

    def wait(self, bucket: Bucket, handle: dist.Work) -> None:
        handle.wait()
        self.unpack(bucket)

    def pack_or_fill(self, bucket: Bucket) -> tuple[Tensor, int]:
        """Returns what is reduced, and the bytes of gradients in it."""
        rows = self.pack(bucket)
        return (self.fill(bucket), bucket.nbytes) if rows is None else (rows, rows.nbytes)

    def fill(self, bucket: Bucket) -> Tensor:
        """Fills slices that `collect` has not filled: zeros for members that are unused here."""
        flat = self._flat(bucket)
        for i, view in zip(bucket.members, flat.slices, strict=True):
            self._move(i, view)
        return flat.buffer

    def allocate(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's buffer, uninitialised."""
        first = bucket.members[0]
        device = self.gradients.parameters[first].device
        return torch.empty(bucket.numel, dtype=self.gradients.dtypes.of(first), device=device)

    def _flat(self, bucket: Bucket) -> Flat:
        if bucket not in self._flats:
            buffer = self.allocate(bucket)
            parameters = [self.gradients.parameters[i] for i in bucket.members]
            self._flats[bucket] = Flat(
                buffer,
                [
                    buffer[start : start + p.numel()].view(p.shape)
                    for start, p in zip(bucket.offsets, parameters, strict=True)
                ],
            )
        return self._flats[bucket]

    def _move(self, i: int, view: Tensor) -> None:
        """Makes the gradient of parameter `i` the given slice of a flat buffer."""
        parameter = self.gradients.parameters[i]
        if parameter.grad is None:
            stand_ins, fill = self.gradients.stand_ins, self.gradients.absent
            absent = stand_ins.get(i)  # reduced already, if an earlier backward had none
            stand_ins[i] = view.fill_(fill) if absent is None else view.copy_(absent)
        elif parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)
