"""The memory of the copy engine's buckets, which lives as long as its wrapper.

Peers hold its addresses, so it is opened once for all buckets, by all ranks together: with the
first plan, or with the first gradient of a copy. It is opened anew where a later plan needs more.
"""

from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor

from ddp.bucketed import BucketedDDP
from ddp.buckets import Bucket, Gradient
from ddp.copy_engine.peer_memory import PeerMemory, Unavailable, why_not

PIECE_BYTES = 64 << 20  # of a larger chunk, so much is pulled and summed at a time
ALIGNMENT_BYTES = 256


class PeerBuckets(BucketedDDP):
    """Flat buckets in memory that every GPU of the host can reach, and a stream to exchange them.

    Attributes:
        memory, start_of: that of all ranks, and the byte at which a bucket begins in it.
        pulled: at most `PIECE_BYTES` for what is pulled from peers.
    """

    memory: PeerMemory | None = None

    @property
    def bytes_outside_allocator(self) -> int:
        """Returns bytes of the GPU that `torch.cuda.max_memory_allocated` does not count."""
        return 0 if self.memory is None else self.memory.nbytes

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        buckets = super().plan(gradients, order)
        self._unbind_gradients()
        sizes = [_aligned(self._bytes_of(bucket)) for bucket in buckets]
        *starts, end = accumulate(sizes, initial=0)
        self.start_of = dict(zip(buckets, starts, strict=True))
        if self.memory is None or end > self._capacity:  # the first plan, or a wider type
            self._close()
            self._capacity = end + ALIGNMENT_BYTES * len(gradients)
            if not self.is_copy:  # all ranks open it together, and one may copy alone
                self._open()
        return buckets

    def before_forward(self) -> None:
        """Frees nothing: peers hold the addresses of this memory."""

    def allocate(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's range of this rank's memory."""
        if self.memory is None:
            self._open()
        memory, dtype = self.memory, self.gradients.dtypes.all[bucket.members[0]]
        return memory.view(memory.rank, self.start_of[bucket], bucket.numel, dtype)

    def _open(self) -> None:
        device = self.gradients.parameters[0].device
        self._check_available(device)
        self.memory = self.open_memory(self._capacity, device)
        largest = max(128 * 8 * self.world_size, min(PIECE_BYTES, self._capacity))
        self.pulled = torch.empty(largest, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def _close(self) -> None:
        """Frees memory that is too small, once no queued work uses it."""
        if self.memory is not None:
            if self.pulled.is_cuda:
                torch.cuda.synchronize(self.pulled.device)
            self.memory = None

    def _check_available(self, device: torch.device) -> None:
        reason = why_not(device, self.process_group)
        if reason:
            raise Unavailable(f"ddp_copy_engine {reason}")

    def open_memory(self, nbytes: int, device: torch.device) -> PeerMemory:
        return PeerMemory(nbytes, device, self.process_group)

    def side_stream(self) -> AbstractContextManager:
        """Returns a context whose work runs on a side stream, after the model's work so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def _unbind_gradients(self) -> None:
        """Gives gradients memory of their own before their slices move."""
        if self.memory is not None:
            for parameter in self.gradients.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _bytes_of(self, bucket: Bucket) -> int:
        return bucket.numel * self.gradients.dtypes.all[bucket.members[0]].itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
