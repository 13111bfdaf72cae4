"""What a collective costs: latency and bandwidth (Hockney 1994), fitted to measured ones.

Of n bytes over W ranks in a ring (Thakur, Rabenseifner and Gropp 2005), with α seconds per hop and
β bytes/s through each rank:

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
        hosts, local = ceil(ranks / self.gpus_per_host), min(ranks, self.gpus_per_host)
        hops, rate = (ranks - 1) * self.latency, self.bandwidth
        if hosts > 1:
            hops = (ranks - hosts) * self.latency + hosts * self.host_latency
            rate = min(rate, local * self.host_bandwidth)
            if kind == "all_reduce":
                hops = min(hops, (local - 1) * self.latency + log2(hosts) * self.host_latency)
        return PASSES[kind] * (hops + (ranks - 1) / ranks * nbytes / rate)

    def fitted(self, samples: Sequence[tuple[float, float]], ranks: int) -> "Network":
        """Returns these links with α and β in a host as all-reduces of (bytes, seconds) tell.

        Least squares of relative errors of t = a + b n; α is at least 0.
        """
        k = [1 / t**2 for _, t in samples]
        n, t = zip(*samples, strict=True)

        def mean(values) -> float:
            return sum(map(float.__mul__, k, map(float, values))) / sum(k)

        def product(a, b) -> list[float]:
            return [x * y for x, y in zip(a, b, strict=True)]

        x, y = mean(n), mean(t)
        b = (mean(product(n, t)) - x * y) / (mean(product(n, n)) - x * x)
        a = y - b * x
        if a < 0 or b <= 0:
            a, b = 0.0, mean(product(n, t)) / mean(product(n, n))
        passes = 2 * (ranks - 1)
        return replace(self, latency=a / passes, bandwidth=passes / ranks / b)
