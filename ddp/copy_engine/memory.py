"""The memory of the copy engine's buckets, which lives as long as its wrapper.

Peers hold its addresses, so all ranks open it together and once for all buckets, with the first
plan. It is opened anew where a later plan needs more, as for wider gradients.
"""

from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor

from ddp.bucketed import BucketedDDP
from ddp.copy_engine.peer_memory import PeerMemory, Unavailable, why_not
from ddp.schedule import Bucket

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

    def plan(self, order: list[int]) -> list[Bucket]:
        buckets = super().plan(order)
        for parameter in self.gradients.parameters if self.memory is not None else ():
            if parameter.grad is not None:  # its slice is about to move
                parameter.grad = parameter.grad.clone()
        dtypes = [self.gradients.dtypes.all[bucket.members[0]] for bucket in buckets]
        sizes = [b.numel * dtype.itemsize for b, dtype in zip(buckets, dtypes, strict=True)]
        aligned = [-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for nbytes in sizes]
        *starts, end = accumulate(aligned, initial=0)
        self.start_of = dict(zip(buckets, starts, strict=True))
        if self.memory is None or end > self._capacity:
            self._open(end + ALIGNMENT_BYTES * len(self.gradients.parameters))
        return buckets

    def allocate(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's range of this rank's memory."""
        assert self.memory is not None  # since the first plan
        dtype = self.gradients.dtypes.all[bucket.members[0]]
        return self.memory.view(self.memory.rank, self.start_of[bucket], bucket.numel, dtype)

    def _open(self, nbytes: int) -> None:
        device = self.gradients.parameters[0].device
        if self.memory is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # queued work uses what is freed now
        self._capacity, self.memory = nbytes, None
        self.memory = self.open_memory(nbytes, device)
        largest = max(128 * 8 * self.world_size, min(PIECE_BYTES, nbytes))
        self.pulled = torch.empty(largest, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def open_memory(self, nbytes: int, device: torch.device) -> PeerMemory:
        if reason := why_not(device, self.process_group):
            raise Unavailable(f"ddp_copy_engine {reason}")
        return PeerMemory(nbytes, device, self.process_group)

    def side_stream(self) -> AbstractContextManager:
        """Returns a context whose work runs on a side stream, after the model's work so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        return self._stream.record_event()
