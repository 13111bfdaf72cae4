"""`ddp_copy_engine`: copy engines move the buckets, so the model keeps its multiprocessors.

The problem with `ddp_bucketed`: perfect overlap still costs. NCCL moves data with kernels;
while they run, the model's own kernels have fewer multiprocessors and often need a second wave.

The idea: a GPU has copy engines, separate units that move memory and compute nothing. The buckets
live in memory that every GPU of the host can reach, and an all-reduce becomes, on a side stream:

    signal    this rank's bucket is filled; wait until all peers' are
    pull      this rank's chunk, 1/W of the bucket, from each peer              (copy engines)
    sum       the W versions of this chunk                                      (a small kernel)
    push      the result into every peer's buffer                               (copy engines)
    signal    all pushes have arrived; wait until all peers' have, too

That is a reduce-scatter and an all-gather: the bytes on the wire are a ring's, 2(W - 1)/W of the
bucket per rank (Thakur, Rabenseifner and Gropp, 2005), and each chunk is summed once, on one rank,
so all replicas hold the same bits. Pushing needs no barrier in between: only this rank reads
its chunk in a peer's buffer, and it has done so. After the last signal no rank reads another's
buffer, so the next step may write to it.

What remains: the copies still take memory bandwidth from the model, the buffers stay allocated
through the next forward, and it works on GPUs of one host only. A stream waits for a peer without
end, so something must watch for ranks that die, as the benchmark does (ddp_by_hand/lm/watch.py).
"""

from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ddp.bucketed import BucketedDDP
from ddp.buckets import Bucket, Gradient
from ddp.copy_engine.exchange import Exchange
from ddp.copy_engine.peer_memory import PeerMemory, Unavailable, why_not

PIECE_BYTES = 64 << 20  # of a larger chunk, so much is pulled and summed at a time
ALIGNMENT_BYTES = 256


class CopyEngineDDP(BucketedDDP):
    """Exchanges flat buckets in peer-to-peer memory with the GPUs' copy engines.

    Half of its methods fill in what `BucketedDDP` leaves open, the others own the memory: that
    of all gradients, and at most `PIECE_BYTES` more for what it pulls, stay allocated.

    Args:
        bucket_size_mb: a bucket's capacity in MiB, a larger gradient has its own; None for one
            bucket per dtype.

    Raises:
        Unavailable: on every rank, without GPUs of one host that can read each other's memory.
    """

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 100, **options):
        self._memory: PeerMemory | None = None
        super().__init__(module, bucket_size_mb=bucket_size_mb, **options)

    @property
    def bytes_outside_allocator(self) -> int:
        """Returns bytes of the GPU that `torch.cuda.max_memory_allocated` does not count."""
        return 0 if self._memory is None else self._memory.nbytes

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        buckets = super().plan(gradients, order)
        self._unbind_gradients()
        sizes = [_aligned(self._bytes_of(bucket)) for bucket in buckets]
        *starts, end = accumulate(sizes, initial=0)
        self._start_of = dict(zip(buckets, starts, strict=True))
        self._exchanges: dict[Bucket, Exchange] = {}
        if self._memory is None or end > self._capacity:  # the first plan, or a wider type
            self._close()
            self._capacity = end + ALIGNMENT_BYTES * len(gradients)
            if not self.is_copy:  # all ranks open it together, and one may copy alone
                self._open()
        return buckets

    def before_forward(self) -> None:
        """Frees nothing: peers hold the addresses of this memory."""

    def launch(self, bucket: Bucket) -> torch.cuda.Event | None:
        buffer = self.fill(bucket)
        scale = 1 / self.world_size if self.reduce == "mean" else 1.0
        with self.side_stream(), record_function("communication: copy engines"):
            if bucket not in self._exchanges:
                memory, start, scratch = self._memory, self._start_of[bucket], self._pulled
                self._exchanges[bucket] = Exchange(memory, start, buffer, scratch)
            self._exchanges[bucket].run(scale)
            return self.record_event()

    def wait(self, bucket: Bucket, handle: torch.cuda.Event | None) -> None:
        if handle is not None:
            torch.cuda.current_stream().wait_event(handle)

    def allocate(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's range of this rank's memory."""
        if self._memory is None:
            self._open()
        memory, dtype = self._memory, self.gradients.dtypes.all[bucket.members[0]]
        return memory.view(memory.rank, self._start_of[bucket], bucket.numel, dtype)

    # ---- memory and streams --------------------------------------------------------------------

    def _open(self) -> None:
        device = self.gradients.parameters[0].device
        self._check_available(device)
        self._memory = self.open_memory(self._capacity, device)
        largest = max(128 * 8 * self.world_size, min(PIECE_BYTES, self._capacity))
        self._pulled = torch.empty(largest, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def _close(self) -> None:
        """Frees memory that is too small, once no queued work uses it."""
        if self._memory is not None:
            if self._pulled.is_cuda:
                torch.cuda.synchronize(self._pulled.device)
            self._memory, self._exchanges = None, {}

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
        if self._memory is not None:
            for parameter in self.gradients.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _bytes_of(self, bucket: Bucket) -> int:
        return bucket.numel * self.gradients.dtypes.all[bucket.members[0]].itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
