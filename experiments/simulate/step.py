"""Simulates one step: what a variant sends when, what that costs, and what it costs computation.

A collective costs latency and bandwidth (Hockney 1994). Of n bytes over W ranks in a ring (Thakur,
Rabenseifner and Gropp 2005), with α seconds per hop and β bytes/s through each rank:

    reduce-scatter, all-gather    (W - 1) α + (W - 1)/W · n / β
    all-reduce                    one after the other: twice that

On H hosts of G GPUs the ring has H hops over the network, with its α. NCCL builds G rings, each
through another network card, so β = min(β in a host, G · β of a card). NCCL also has double trees
for all-reduces (Sanders, Speck and Träff 2009), whose α is 2 ((G - 1) α + log2 H α between hosts).
The lower latency counts.

A program is a list of instructions of the computing stream: ("compute", seconds), ("send", seconds)
and ("wait", n). A send joins the queue of the communicating stream, which carries out one
collective at a time; a wait lasts until n are finished. Time goes from event to event, the next end
of a computation or of a collective. While both streams work, computation advances at 1/s and
communication at 1/c of its speed (`Contention`); alone, each at full speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf, log2
from typing import NamedTuple

import numpy as np

from ddp.buckets import Gradient, plan_buckets
from lm.memory import MIB, REPLICATED, SHARDED, bucket_mb
from lm.shape import Shape

VARIANTS = (*REPLICATED, *SHARDED)
SINGLE = ("ddp", "ddp_individual")  # each gradient travels alone, and is divided afterwards
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
NOTHING = 1e-12  # seconds; what arithmetic leaves of a finished piece
Program = list[tuple[str, float]]


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
        """Returns these links with α ≥ 0 and β in a host as all-reduces of (bytes, seconds) tell.

        Least squares of relative errors of t = a + b n.
        """
        n, t = np.array(samples).T
        b, a = np.polyfit(n, t, 1, w=1 / t)
        if a < 0 or b <= 0:
            a, b = 0.0, sum(n / t) / sum((n / t) ** 2)
        passes = 2 * (ranks - 1)
        return replace(self, latency=a / passes, bandwidth=passes / ranks / b)


class Plan(NamedTuple):
    """A kind of collective, of which buckets of gradients, of how many bytes; copies per byte."""

    kind: str
    buckets: list[tuple[int, ...]]
    nbytes: list[int]
    copies: int


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
    nbytes = [sum(gradients[i].nbytes for i in bucket) for bucket in buckets]
    kind = "reduce_scatter" if variant in SHARDED else "all_reduce"
    return Plan(kind, buckets, nbytes, {"torch_ddp": 2, "ddp_individual_v2": 0}.get(variant, 1))


class Contention(NamedTuple):
    """Factors by which computation and communication slow each other; host seconds per launch."""

    computation: float
    communication: float
    launch: float


class Times(NamedTuple):
    """Seconds of one step: forward per unit, backward per gradient; `copy` is per byte."""

    forward: list[float]
    backward: list[float]
    optimizer: float
    rest: float
    copy: float


class Outcome(NamedTuple):
    """One step, in seconds: all of it, what is computed, and how long computation waited."""

    step: float
    computed: float
    exposed: float

    @property
    def contention(self) -> float:  # what computation lost while communication worked beside it
        return self.step - self.computed - self.exposed


def run(program: Program, contention: Contention) -> Outcome:
    """Runs a program. What is still being sent at its end is not part of the step."""
    now = computed = exposed = 0.0
    queue: list[float] = []  # seconds left, alone, of what is sent and not finished
    finished = 0
    for what, amount in program:
        if what == "send":
            queue.append(amount)
            continue
        computes = what == "compute"
        left = amount if computes else inf
        while left > 0 if computes else finished < amount:
            beside = computes and bool(queue)
            s, c = (contention.computation, contention.communication) if beside else (1.0, 1.0)
            span = min(left * s, queue[0] * c if queue else inf)
            now, left = now + span, left - span / s
            left = 0.0 if left < NOTHING else left
            exposed += 0.0 if computes else span
            if queue:
                queue[0] -= span / c
                if queue[0] < NOTHING:
                    del queue[0]
                    finished += 1
        computed += amount if computes else 0.0
    return Outcome(now, computed, exposed)


def simulate(
    times: Times, network: Network, contention: Contention, variant: str, shape: Shape, ranks: int
) -> Outcome:
    """Returns a step; on one rank nothing is sent."""
    launch = contention.launch
    return run(program_of(times, network, variant, shape, ranks, launch), contention)


def program_of(times, network, variant: str, shape: Shape, ranks: int, launch: float) -> Program:
    layout, shards = plan(variant, shape), variant in SHARDED
    update = ("compute", times.optimizer / (ranks if shards else 1) + times.rest)
    program: Program = [("compute", sum(times.forward))]
    if ranks == 1 or variant == "none":
        return [*program, ("compute", sum(times.backward)), update]

    def send(kind: str, nbytes: float) -> Program:
        return [("compute", launch), ("send", network.seconds(kind, nbytes, ranks))]

    copies = [layout.copies * times.copy * nbytes for nbytes in layout.nbytes]
    pieces = [sum(times.backward[i] for i in members) for members in layout.buckets]
    if variant == "fsdp":
        return _gathered(times, layout, pieces, copies, send, update)
    if variant == "ddp":
        program.append(("compute", sum(pieces)))
        for number, (nbytes, copying) in enumerate(zip(layout.nbytes, copies, strict=True)):
            program += [*send("all_reduce", nbytes), ("wait", number + 1), ("compute", copying)]
        return [*program, update]
    late = variant in SINGLE  # what is divided, after the wait
    for piece, nbytes, copying in zip(pieces, layout.nbytes, copies, strict=True):
        program += [("compute", piece + (0 if late else copying)), *send(layout.kind, nbytes)]
    program += [("wait", len(copies)), ("compute", sum(copies) if late else 0.0)]
    if not shards:
        return [*program, update]
    for nbytes in layout.nbytes:  # the parameters of a bucket travel while the next one is stepped
        share = times.optimizer / ranks * nbytes / sum(layout.nbytes)
        program += [("compute", share), *send("all_gather", nbytes)]
    return [*program, ("compute", times.rest), ("wait", 2 * len(copies))]


def _gathered(times: Times, layout: Plan, pieces, copies, send: Callable, update) -> Program:
    """Gathers each block before its use, the next one meanwhile; what is in no block comes first.

    That stays whole until its gradients are there, which are the first ones and the last one. The
    first gathers of a step run beside the optimizer.
    """
    *blocks, root = range(len(pieces))  # in the order of backward
    last = times.backward[layout.buckets[root][-1]]
    gathers = [send("all_gather", nbytes) for nbytes in layout.nbytes]
    program = [*gathers[root], *gathers[blocks[-1]], update, ("wait", 1),
               ("compute", times.forward[0])]  # fmt: skip
    sent = gathered = 2  # how many must be finished for the next block to be whole
    uses = [*blocks[::-1], *blocks, None]
    for place, (block, following) in enumerate(pairwise(uses)):
        needed = gathered
        if following not in (None, block):  # the last one is whole at once in backward
            program += gathers[following]
            gathered = sent = sent + 1
        program.append(("wait", needed))
        if place < len(blocks):
            program.append(("compute", times.forward[place + 1]))
            continue
        if place == len(blocks):
            program.append(("compute", times.forward[-1] + pieces[root] - last))
        program.append(("compute", pieces[block] + copies[block]))
        program += send("reduce_scatter", layout.nbytes[block])
        sent += 1
    program.append(("compute", last + copies[root]))
    return [*program, *send("reduce_scatter", layout.nbytes[root]), ("wait", sent + 1)]
