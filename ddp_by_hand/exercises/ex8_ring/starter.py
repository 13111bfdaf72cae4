"""Exercise 8, ring: an all-reduce made of sends and receives.

What
    Write all_reduce yourself. The W ranks form a ring, and each only sends to its right neighbour.
    Cut the tensor into W chunks.

        reduce-scatter   W - 1 rounds: send one chunk to the right, receive another from the left
                         and add it to your own. Afterwards each rank holds one finished chunk.
        all-gather       W - 1 rounds: pass the finished chunks on, without adding.

        3 ranks, which chunk rank r sends       round 0     round 1
            reduce-scatter                      r           r - 1
            all-gather                          r + 1       r            (all modulo 3)

Why it matters
    Each rank sends 2 (W - 1) / W of the tensor, nearly twice its size however many ranks there are.
    Sending everything to everyone would be W - 1 times its size. Every "bus bandwidth" that you
    read of an all-reduce is its size times this factor, over its time.

You need
    dist.send(tensor, dst), dist.recv(tensor, src)   block until the other side is there
    dist.isend, dist.irecv                           return a handle to wait for
    tensor.chunk(W), or tensor.tensor_split(W)       one of them always gives W pieces

Beware
    If all ranks first send and then receive, all wait for ever.
    The number of elements need not be a multiple of W, and may be smaller than W.

Check it        ddp-exercise check ring my_ring.py
Then read       ddp/copy_engine/exchange.py: the same two halves, pulled by the copy engines
"""

import torch
import torch.distributed as dist  # noqa: F401 - you will need it


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replaces the contiguous `tensor` by its sum over all ranks, on every rank."""
    raise NotImplementedError("reduce-scatter, then all-gather, with send and recv")
