"""Predicts what a variant sends, and what that takes on links that were measured.

A collective costs latency and bandwidth (Hockney 1994). Of n bytes over W ranks in a ring (Thakur,
Rabenseifner and Gropp 2005), with α seconds per hop and β bytes/s through each rank:

    reduce-scatter, all-gather    (W - 1) α + (W - 1)/W · n / β
    all-reduce                    one after the other: twice that

On H hosts of G GPUs the ring has H hops over the network, with its α. NCCL builds G rings, each
through another network card, so β = min(β in a host, G · β of a card). NCCL also has double trees
for all-reduces (Sanders, Speck and Träff 2009), whose α is 2 ((G - 1) α + log2 H α between hosts).
The lower latency counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from ddp.buckets import Gradient, plan_buckets
from ddp_by_hand.lm.memory import MIB, REPLICATED, SHARDED, bucket_mb
from ddp_by_hand.lm.shape import Shape

VARIANTS = (*REPLICATED, *SHARDED)
SINGLE = ("ddp", "ddp_individual")  # each gradient travels alone, and is divided afterwards
SLOWEST = 10.0  # a factor of contention that is larger is a fault of measurement
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


@dataclass(frozen=True)
class Network:
    """Links: α in seconds, β in bytes/s per GPU, inside a host and between hosts."""

    latency: float
    bandwidth: float
    gpus_per_host: int
    host_latency: float
    host_bandwidth: float

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        """Returns what a collective takes with nothing beside it; 0 for one rank."""
        hosts, local = ceil(ranks / self.gpus_per_host), self.local(ranks)
        hops, rate = (ranks - 1) * self.latency, self.bandwidth
        if hosts > 1:
            hops = (ranks - hosts) * self.latency + hosts * self.host_latency
            rate = min(rate, local * self.host_bandwidth)
            if kind == "all_reduce":
                hops = min(hops, (local - 1) * self.latency + log2(hosts) * self.host_latency)
        return PASSES[kind] * (hops + (ranks - 1) / ranks * nbytes / rate)

    def local(self, ranks: int) -> int:
        """Returns how many of the ranks share a host."""
        return min(ranks, self.gpus_per_host)

    def fitted(self, samples: Sequence[tuple[float, float]], ranks: int) -> "Network":
        """Returns these links with α ≥ 0 and β in a host as all-reduces of (bytes, seconds) tell.

        Least squares of relative errors of t = a + b n.
        """
        n, t = np.array(samples).T
        b, a = np.polyfit(n, t, 1, w=1 / t)
        if a < 0 or b <= 0:
            a, b = 0.0, sum(n / t) / sum((n / t) ** 2)
        passes = 2 * (ranks - 1)
        return replace(self, latency=a / passes, bandwidth=passes / ranks / b)


class Contention(NamedTuple):
    """Factors by which computation and communication slow each other; host seconds per launch."""

    computation: float
    communication: float
    launch: float

    def at(self, part: float) -> "Contention":
        """Returns a part of the costs: 0 none, 1 the slowdown, 2 launches too, beyond more of both.

        The order is that in which traces are to be trusted: the profiler slows the host, and so
        makes launches late, but not kernels.
        """
        slow, launched = min(part, 1.0) + max(part - 2.0, 0.0), max(part - 1.0, 0.0)
        s, c = (1 + slow * (factor - 1) for factor in self[:2])
        return Contention(s, c, launched * self.launch)


def factor(seconds: float, longer: float) -> float:
    """Returns by what work is slowed that took so many seconds, so much longer than alone."""
    return max(1.0, seconds / max(seconds - longer, seconds / SLOWEST)) if seconds else 1.0


class Plan(NamedTuple):
    """A kind of collective, of which buckets of gradients, of how many bytes; copies per byte.

    `diloco` sends what a round has moved, in its outer step. That reads and writes as many bytes as
    ten copies: differences, momentum, the step, and where the next round begins.

    `fsdp` reduces and steps float32 numbers. It copies gradients, and slices that it gathers, from
    or to the dtype of the arithmetic: not both sides of these copies are then 4 bytes wide.
    """

    kind: str
    buckets: list[tuple[int, ...]]
    nbytes: list[int]
    copies: float


def plan(variant: str, shape: Shape) -> Plan:
    """Returns what a variant sends. A bucket of `fsdp` is a block, or all in no block.

    The others are planned as the hand-built ones are, PyTorch's DDP too, whose rule is similar.
    """
    capacity = 0 if variant in SINGLE else int(bucket_mb(variant, shape.bucket_size_mb) * MIB)
    gradients = [Gradient(numel, "", shape.width) for numel in shape.gradients.values()]
    planned = plan_buckets(gradients, list(range(len(gradients))), capacity)
    buckets = [] if variant == "none" else [bucket.members for bucket in planned]
    if variant == "fsdp":
        block_of = [n.split(".")[1] * n.startswith("blocks.") for n in shape.gradients]
        units = [tuple(i for i, b in enumerate(block_of) if b == block) for block in set(block_of)]
        buckets = sorted(units, key=max)
    width = 4 if variant == "fsdp" else shape.width
    nbytes = [width * sum(gradients[i].numel for i in bucket) for bucket in buckets]
    kind = "reduce_scatter" if variant in SHARDED else "all_reduce"
    copies = {
        "torch_ddp": 2, "ddp_individual_v2": 0, "diloco": 10, "fsdp": (shape.arithmetic + 4) / 8
    }  # fmt: skip
    return Plan(kind, buckets, nbytes, copies.get(variant, 1))
