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

import torch
from torch import nn
from torch.profiler import record_function

from ddp.copy_engine.exchange import Exchange
from ddp.copy_engine.memory import PeerBuckets
from ddp.schedule import Bucket


class CopyEngineDDP(PeerBuckets):
    """Exchanges flat buckets in peer-to-peer memory with the GPUs' copy engines.

    That of all gradients, and at most 64 MiB more for what it pulls, stay allocated (memory.py).

    Args:
        bucket_size_mb: as of `BucketedDDP`.

    Raises:
        Unavailable: on every rank, without GPUs of one host that can read each other's memory.
    """

    def __init__(self, module: nn.Module, *, bucket_size_mb: float | None = 100, **options):
        super().__init__(module, bucket_size_mb=bucket_size_mb, **options)

    def plan(self, order: list[int]) -> list[Bucket]:
        self._exchanges: dict[Bucket, Exchange] = {}
        return super().plan(order)

    def launch(self, bucket: Bucket) -> torch.cuda.Event | None:
        buffer = self.fill(bucket)
        scale = 1 / self.world_size if self.reduce == "mean" else 1.0
        with self.side_stream(), record_function("communication: copy engines"):
            if bucket not in self._exchanges:
                memory, start = self.memory, self.start_of[bucket]
                self._exchanges[bucket] = Exchange(memory, start, buffer, self.pulled)
            self._exchanges[bucket].run(scale)
            return self.record_event()

    def wait(self, bucket: Bucket, handle: torch.cuda.Event | None) -> None:
        if handle is not None:
            torch.cuda.current_stream().wait_event(handle)
