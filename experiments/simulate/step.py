"""Simulates one step: computation and communication, each in order, at each other's expense.

A program is a list of instructions of the computing stream: ("compute", seconds), ("send", seconds)
and ("wait", n). A send joins the queue of the communicating stream, which carries out one
collective at a time; a wait lasts until n are finished. Time goes from event to event, the next end
of a computation or of a collective. While both streams work, computation advances at 1/s and
communication at 1/c of its speed (`Contention`); alone, each at full speed.
"""

from dataclasses import dataclass
from functools import partial
from math import inf

from experiments.simulate.calibrate import Calibration, Contention, Times
from experiments.simulate.plan import SINGLE, Plan, kind_of, plan
from lm.memory import SHARDED
from lm.shape import Shape

Program = list[tuple[str, float]]
LIKE = {"torch_ddp_tuned": "torch_ddp", "ddp_individual_v2": "ddp_individual"}
NOTHING = 1e-12  # seconds; what arithmetic leaves of a finished piece


@dataclass(frozen=True)
class Outcome:
    """One step, in seconds: all of it, what is computed, and how long computation waited."""

    step: float
    computed: float
    exposed: float

    @property
    def contention(self) -> float:
        """Returns what computation lost while communication worked beside it."""
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


def simulate(found: Calibration, variant: str, shape: Shape, ranks: int) -> Outcome:
    """Returns the step of a variant on a number of ranks.

    A variant that was not traced has the contention of its like, or of `ddp_bucketed`.
    """
    known = found.contention
    like = next((v for v in (variant, LIKE.get(variant), "ddp_bucketed") if v in known), "ddp")
    return run(program_of(found, variant, shape, ranks, known[like]), known[like])


def program_of(
    found: Calibration, variant: str, shape: Shape, ranks: int, contention: Contention
) -> Program:
    """Writes the program of a variant; on one rank nothing is sent."""
    times, layout, shards = found.times(shape), plan(variant, shape), variant in SHARDED
    update = ("compute", times.optimizer / (ranks if shards else 1) + times.rest)
    if ranks == 1 or variant == "none":
        return [("compute", sum(times.forward) + sum(times.backward)), update]
    send = partial(_send, found, ranks, contention.launch)
    copy = [layout.copies * times.copy * nbytes for nbytes in layout.nbytes]
    if variant == "fsdp":
        return _gathered(times, layout, copy, send, update)
    program: Program = [("compute", sum(times.forward))]
    if variant == "ddp":
        program.append(("compute", sum(times.backward)))
        for number, nbytes in enumerate(layout.nbytes):
            program += [
                *send("all_reduce", nbytes),
                ("wait", number + 1),
                ("compute", copy[number]),
            ]
        return [*program, update]
    late = variant in SINGLE  # what is divided, after the wait
    for members, nbytes, copying in zip(layout.buckets, layout.nbytes, copy, strict=True):
        seconds = sum(times.backward[i] for i in members)
        program += [
            ("compute", seconds + (0 if late else copying)),
            *send(kind_of(variant), nbytes),
        ]
    program += [("wait", len(copy)), ("compute", sum(copy) if late else 0.0)]
    if not shards:
        return [*program, update]
    for nbytes in layout.nbytes:  # the parameters of a bucket travel while the next one is stepped
        share = times.optimizer / ranks * nbytes / sum(layout.nbytes)
        program += [("compute", share), *send("all_gather", nbytes)]
    return [*program, ("compute", times.rest), ("wait", 2 * len(copy))]


def _send(found: Calibration, ranks: int, launch: float, kind: str, nbytes: float) -> Program:
    return [("compute", launch), ("send", found.network.seconds(kind, nbytes, ranks))]


def _gathered(times: Times, layout: Plan, copy: list[float], send, update) -> Program:
    """Gathers each block before its use, the next one meanwhile; what is in no block comes first.

    That stays whole until its gradients are there, which are the first ones and the last one. The
    first gathers of a step run beside the optimizer.
    """
    *blocks, root = range(len(layout.nbytes))  # in the order of backward
    program = [*send("all_gather", layout.nbytes[root]),
               *send("all_gather", layout.nbytes[blocks[-1]]), update, ("wait", 1),
               ("compute", times.forward[0])]  # fmt: skip
    sent = gathered = 2  # how many must be finished for the next block to be whole
    uses = [*blocks[::-1], *blocks]
    for place, block in enumerate(uses):
        needed, forward = gathered, place < len(blocks)
        following = uses[place + 1 : place + 2]
        if following and following != [block]:  # the last one is whole at once in backward
            program += send("all_gather", layout.nbytes[following[0]])
            gathered = sent = sent + 1
        program.append(("wait", needed))
        if forward:
            program.append(("compute", times.forward[len(blocks) - block]))
            continue
        if place == len(blocks):
            first = sum(times.backward[i] for i in layout.buckets[root][:-1])
            program.append(("compute", times.forward[-1] + first))
        seconds = sum(times.backward[i] for i in layout.buckets[block]) + copy[block]
        program += [("compute", seconds), *send("reduce_scatter", layout.nbytes[block])]
        sent += 1
    program.append(("compute", times.backward[layout.buckets[root][-1]] + copy[root]))
    return [*program, *send("reduce_scatter", layout.nbytes[root]), ("wait", sent + 1)]
