"""`ddp_copy_engine`: the same buckets, moved without taking multiprocessors from the model.

The problem that `ddp_bucketed` leaves: perfect overlap still costs. NCCL moves data with kernels;
while they run, the model's own kernels have fewer multiprocessors and often need a second wave.

The idea: a GPU has copy engines, separate units that move memory and compute nothing. The buckets
live in memory that every GPU of the host can read, and an all-reduce becomes, on a side stream:

    copy      the gradients into this rank's flat buffer
    barrier   every rank's bucket is filled
    pull      my chunk, 1/W of the bucket, from every other rank           (copy engines)
    sum       the W versions of my chunk into my buffer                    (a small kernel)
    barrier   every rank's chunk is reduced
    pull      each other chunk from the rank that reduced it               (copy engines)
    barrier   nobody reads my buffer any more, so I may write to it again

That is a reduce-scatter and an all-gather: the bytes on the wire are a ring's, 2(W − 1)/W of the
bucket a rank (Thakur, Rabenseifner and Gropp, 2005), and each chunk is summed once, on one rank,
so all replicas hold the same bits.

What it leaves: the buffers stay allocated through the next forward, the small sum and the copy
into the buckets still cost memory bandwidth, and it works on GPUs of one host only.
"""

from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ddp.bucketed import BucketedDDP
from ddp.buckets import Bucket, Gradient
from ddp.kernels import combine
from ddp.peer_memory import PeerMemory, Unavailable, why_not

PIECE_BYTES = 64 << 20  # larger chunks are pulled and summed piece by piece
ALIGNMENT_BYTES = 256


class CopyEngineDDP(BucketedDDP):
    """Flat buckets in peer-to-peer memory, exchanged by the copy engines.

    It keeps the bytes of all gradients allocated, and at most `PIECE_BYTES` more for what it pulls.

    Raises:
        Unavailable: without GPUs of one host that can read each other's memory.
    """

    def __init__(self, module: nn.Module, **options):
        self._memory: PeerMemory | None = None
        super().__init__(module, **options)

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        buckets = super().plan(gradients, order)
        self._unbind_gradients()
        ends = list(accumulate(_aligned(self._bytes_of(bucket)) for bucket in buckets))
        starts = [0, *ends[:-1]]
        if self._memory is None:
            self._open(ends[-1] + ALIGNMENT_BYTES * len(gradients))
        self._start_of = dict(zip(buckets, starts, strict=True))
        return buckets

    def before_forward(self) -> None:
        """Nothing to let go of: peers hold the addresses of this memory."""

    def launch(self, bucket: Bucket) -> torch.cuda.Event | None:
        with self.side_stream(), record_function("communication: copy engines"):
            flat = self.fill(bucket)
            self.count(collectives=1, nbytes=bucket.nbytes)
            self._exchange(bucket, flat.numel(), flat.dtype)
            return self.record_event()

    def wait(self, bucket: Bucket, handle: torch.cuda.Event | None) -> None:
        if handle is not None:
            torch.cuda.current_stream().wait_event(handle)

    def flat_buffer(self, bucket: Bucket) -> Tensor:
        dtype = self._parameters_by_index[bucket.members[0]].dtype
        memory = self._memory
        return memory.view(memory.rank, self._start_of[bucket], bucket.numel, dtype)

    def copy(self, slices: list[Tensor], sources: list[Tensor]) -> None:
        super().copy(slices, sources)
        for source in sources:
            if source.is_cuda:  # the allocator must not reuse it before this stream has read it
                source.record_stream(self._stream)

    # ---- the exchange --------------------------------------------------------------------------

    def _exchange(self, bucket: Bucket, numel: int, dtype: torch.dtype) -> None:
        memory, start = self._memory, self._start_of[bucket]
        chunks = chunk_bounds(numel, memory.world_size)

        def part(rank: int, low: int, high: int) -> Tensor:
            return memory.view(rank, start + low * dtype.itemsize, high - low, dtype)

        others = [(memory.rank + k) % memory.world_size for k in range(1, memory.world_size)]
        memory.barrier()
        for low, high in self._pieces(chunks[memory.rank], dtype):
            pulled = self._scratch(len(others), high - low, dtype)
            for row, peer in zip(pulled, others, strict=True):
                row.copy_(part(peer, low, high))
            scale = 1 / memory.world_size if self.reduce == "mean" else 1.0
            combine(part(memory.rank, low, high), pulled, scale)
        memory.barrier()
        for peer in others:
            low, high = chunks[peer]
            part(memory.rank, low, high).copy_(part(peer, low, high))
        memory.barrier()

    def _pieces(self, chunk: tuple[int, int], dtype: torch.dtype) -> list[tuple[int, int]]:
        rows = max(1, self.world_size - 1)
        step = max(1, PIECE_BYTES // (rows * dtype.itemsize) // 128 * 128)
        low, high = chunk
        return [(at, min(at + step, high)) for at in range(low, high, step)]

    def _scratch(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._pulled[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    # ---- memory and streams --------------------------------------------------------------------

    def _open(self, nbytes: int) -> None:
        device = self._parameters_by_index[0].device
        self._check_available(device)
        self._memory = self.open_memory(nbytes, device)
        self._pulled = torch.empty(min(PIECE_BYTES, nbytes), dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def _check_available(self, device: torch.device) -> None:
        reason = why_not(device, self.process_group)
        if reason:
            raise Unavailable(f"ddp_copy_engine is not available: {reason}")

    def open_memory(self, nbytes: int, device: torch.device) -> PeerMemory:
        return PeerMemory(nbytes, device, self.process_group)

    def side_stream(self) -> AbstractContextManager:
        """Work inside is queued beside the model's, behind what is queued there so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def _unbind_gradients(self) -> None:
        """Before the slices move: gradients that live in them get memory of their own."""
        if self._memory is not None:
            for parameter in self._parameters_by_index:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _bytes_of(self, bucket: Bucket) -> int:
        return bucket.numel * self._parameters_by_index[bucket.members[0]].element_size()


def chunk_bounds(numel: int, world_size: int) -> list[tuple[int, int]]:
    """The half-open range of elements that each rank reduces; the last ones may be empty."""
    step = -(-numel // world_size)
    step = -(-step // 128) * 128  # whole cache lines
    return [(min(r * step, numel), min((r + 1) * step, numel)) for r in range(world_size)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
