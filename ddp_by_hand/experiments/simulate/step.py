"""Simulates one step: what is sent when, and what that costs computation.

A program is a list of instructions of the computing stream: ("compute", seconds), ("send", seconds)
and ("wait", n). A send joins the queue of the communicating stream, which carries out one
collective at a time; a wait lasts until n are finished. Time goes from event to event, the next end
of a computation or of a collective. While both streams work, computation advances at 1/s and
communication at 1/c of its speed (`Contention`); alone, each at full speed.
"""

from itertools import pairwise
from math import inf
from typing import NamedTuple

from ddp_by_hand.lm.exchange import SINGLE, Contention, Network, Plan, plan
from ddp_by_hand.lm.memory import SHARDED
from ddp_by_hand.lm.shape import Shape, Times

NOTHING = 1e-12  # seconds; what arithmetic leaves of a finished piece
Program = list[tuple[str, float]]


class Outcome(NamedTuple):
    """One step, in seconds: all of it, what is computed, and how long computation waited."""

    step: float
    computed: float
    exposed: float

    @property
    def contention(self) -> float:  # what computation lost while communication worked beside it
        return max(0.0, self.step - self.computed - self.exposed)

    def mean(self, other: "Outcome", steps: int) -> "Outcome":
        """Returns the mean of so many steps, of which this is one, and the others are `other`."""
        return Outcome(*((a + (steps - 1) * b) / steps for a, b in zip(self, other, strict=True)))


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


def program_of(
    times: Times, network: Network, variant: str, shape: Shape, ranks: int, launch: float
) -> Program:
    """Writes the program of a variant; on one rank nothing is sent."""
    layout, shards = plan(variant, shape), variant in SHARDED
    stepped = sum(layout.nbytes) / shape.gradient_bytes / ranks if shards else 1
    update = ("compute", times.optimizer * stepped + times.rest)
    program: Program = [("compute", sum(times.forward))]
    if ranks == 1 or variant == "none":
        return [*program, ("compute", sum(times.backward)), update]

    def send(kind: str, nbytes: float) -> Program:
        return [("compute", launch), ("send", network.seconds(kind, nbytes, ranks))]

    copies = [layout.copies * times.copy * nbytes for nbytes in layout.nbytes]
    pieces = [sum(times.backward[i] for i in members) for members in layout.buckets]
    if variant == "fsdp":
        gathers = [
            [("compute", copying / ranks), *send("all_gather", nbytes * shape.arithmetic / 4)]
            for nbytes, copying in zip(layout.nbytes, copies, strict=True)
        ]
        return _gathered(times, layout, pieces, copies, send, update, gathers)
    if variant == "ddp":
        program.append(("compute", sum(pieces)))
        for number, (nbytes, copying) in enumerate(zip(layout.nbytes, copies, strict=True)):
            program += [*send("all_reduce", nbytes), ("wait", number + 1), ("compute", copying)]
        return [*program, update]
    if variant == "diloco":  # its outer step, behind the last one of a round
        program += [("compute", sum(pieces)), update]
        for nbytes, copying in zip(layout.nbytes, copies, strict=True):
            program += [("compute", copying), *send("all_reduce", nbytes)]
        return [*program, ("wait", len(copies))]
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


def _gathered(times: Times, layout: Plan, pieces, copies, send, update, gathers) -> Program:
    """Gathers each block before its use, the next one meanwhile; what is in no block comes first.

    That stays whole until its gradients are there, which are the first ones and the last one. The
    first gathers of a step run beside the optimizer.
    """
    *blocks, root = range(len(pieces))  # in the order of backward
    last = times.backward[layout.buckets[root][-1]]
    program = [*gathers[root], *gathers[blocks[-1]], update, ("wait", 1),
               ("compute", times.forward[0])]  # fmt: skip
    sent = gathered = 2  # how many must be finished for the next block to be whole
    for place, (block, following) in enumerate(pairwise([*blocks[::-1], *blocks, None])):
        needed = gathered
        if following not in (None, block):  # the last one is whole at once in backward
            program += gathers[following]
            gathered = sent = sent + 1
        program.append(("wait", needed))
        if place < len(blocks):
            program.append(("compute", times.forward[place + 1]))
            continue
        of_loss = times.forward[-1] + pieces[root] - last if place == len(blocks) else 0.0
        program.append(("compute", of_loss + pieces[block] + copies[block]))
        program += send("reduce_scatter", layout.nbytes[block])
        sent += 1
    program.append(("compute", last + copies[root]))
    return [*program, *send("reduce_scatter", layout.nbytes[root]), ("wait", sent + 1)]
