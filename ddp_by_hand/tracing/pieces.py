"""Cuts the steps of a trace into pieces: forward, backward at each gradient, what follows.

    forward_pass   backward_pass                     gradient_sync   optimizer_step
    ├────────────┤ ├────────┬────┬──────────┬──────┤ ├───────────┤   ├────────────┤
                            gradients are final

Each piece knows how long each kind of work lasted in it, in seconds: products of matrices,
attention, other computation, and gaps in which nothing computed.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from .intervals import Interval, difference, intersection, total, union
from .overlap import Overlap, overlap, steps
from .trace import Trace

Work = tuple[float, float, float, float]  # seconds of products, attention, other, gaps
SECONDS = 1e-6  # of a trace's unit


@dataclass(frozen=True)
class StepPieces:
    """One step of one rank, in seconds.

    backward        work until each gradient was final, one piece per gradient; the work after the
                    last one is part of the last piece
    beside          work of forward and backward while a collective was under way. On a GPU, also
                    while it waited for a rank: its kernel holds multiprocessors meanwhile. On a CPU
                    a thread that waits leaves the core to others.
    rest            the step without forward, backward, `gradient_sync` and the optimizer
    clipped         whether the step clipped gradients
    whole           computation and communication of the step, in microseconds
    """

    forward: Work
    backward: list[Work]
    beside: Work
    optimizer: float
    rest: float
    clipped: bool
    seconds: float
    whole: Overlap


def pieces(trace: Trace) -> list[StepPieces]:
    """Returns the trace's whole steps: those with one forward, backward and optimizer step."""
    return [step for window in steps(trace) if (step := _cut(trace, window))]


def undisturbed(trace: Trace) -> list[StepPieces]:
    """Returns the faster half of the steps without clipping: other programs only slow one down."""
    return faster_half((s for s in pieces(trace) if not s.clipped), lambda step: step.seconds)


def faster_half(values: Iterable, key: Callable | None = None) -> list:
    found = sorted(values, key=key)
    return found[: (len(found) + 1) // 2]


class Slowdown(NamedTuple):
    """Holds what a variant's steps have beyond those of the floor, which does not communicate.

    beside          products and attention of forward and backward beside communication
    longer          how much longer all products and attention took
    communicating   collectives, without waiting for a rank
    overlapped      the part of them beside computation
    idle            how much longer nothing was done, or a rank was waited for
    """

    beside: float
    longer: float
    communicating: float
    overlapped: float
    idle: float


def slowdown(own: Sequence[StepPieces], floor: Sequence[StepPieces]) -> Slowdown:
    """Compares medians of steps, in seconds."""

    def same(step: StepPieces) -> float:
        return sum(sum(work[:2]) for work in (step.forward, *step.backward))

    def idle(step: StepPieces) -> float:
        return SECONDS * (step.whole.idle + step.whole.waiting)

    def longer(time: Callable[[StepPieces], float]) -> float:
        return median(map(time, own)) - median(map(time, floor))

    return Slowdown(
        median(sum(step.beside[:2]) for step in own), longer(same),
        SECONDS * median(step.whole.communication for step in own),
        SECONDS * median(step.whole.overlapped for step in own), longer(idle),
    )  # fmt: skip


def collective_seconds(traces: Sequence[Trace], number: int) -> list[float]:
    """Returns how long each of `number` collectives of a step lasts, in the faster half of steps.

    That is from when the last rank joins to its end, in the mean over the ranks, whose traces are
    given. Raises ValueError if a step has another number of collectives.
    """
    calls = [sorted(i for own in trace.collectives.values() for i in own) for trace in traces]
    if len(set(map(len, calls))) > 1 or len(calls[0]) % number:
        raise ValueError(f"the traces have not {number} collectives per step")
    lasted = [
        SECONDS * fmean(max(1.0, end - max(start for start, _ in ranks)) for _, end in ranks)
        for ranks in zip(*calls, strict=True)
    ]
    return [median(faster_half(lasted[i::number])) for i in range(number)]


def _cut(trace: Trace, window: Interval) -> StepPieces | None:
    def inside(name: str) -> list[Interval]:
        return [p for p in trace.phases.get(name, []) if window[0] <= p[0] < window[1]]

    phases = [inside(name) for name in ("forward_pass", "backward_pass", "optimizer_step")]
    if any(len(found) != 1 for found in phases):
        return None
    (forward,), (backward,), (optimizer,) = phases
    trace = _restrict(trace, window)
    sync = inside("gradient_sync") or [(backward[1], backward[1])]
    final = [time for time in trace.gradients if backward[0] < time <= backward[1]]
    edges = [backward[0], *final[:-1], backward[1]]
    until = max(backward[1], sync[0][1])
    busy = forward[1] - forward[0] + until - backward[0] + optimizer[1] - optimizer[0]
    held = trace.communication + (trace.waiting if trace.kernels else [])
    beside = [_work(trace, piece) for piece in intersection(held, [forward, backward])]
    return StepPieces(
        forward=_work(trace, forward),
        backward=[_work(trace, piece) for piece in pairwise(edges)],
        beside=tuple(map(sum, zip((0.0,) * 4, *beside, strict=True))),
        optimizer=(optimizer[1] - optimizer[0]) * SECONDS,
        rest=max(0.0, window[1] - window[0] - busy) * SECONDS,
        clipped=bool(inside("gradient_clipping_warmup")),
        seconds=(window[1] - window[0]) * SECONDS,
        whole=overlap(trace, window),
    )


def _restrict(trace: Trace, window: Interval) -> Trace:
    """Returns the trace with what computes or communicates in a window alone."""

    def near(intervals: list[Interval]) -> list[Interval]:
        return [i for i in intervals if i[1] > window[0] and i[0] < window[1]]

    return replace(
        trace, computation=union(near(trace.computation)),
        communication=near(trace.communication), waiting=near(trace.waiting),
        kinds={kind: union(near(own)) for kind, own in trace.kinds.items()},
    )  # fmt: skip


def _work(trace: Trace, piece: Interval) -> Work:
    def within(intervals: list[Interval]) -> list[Interval]:
        first = max(0, bisect_left(intervals, (piece[0],)) - 1)
        return intersection(intervals[first : bisect_left(intervals, (piece[1],))], [piece])

    products = within(trace.kinds.get("products", []))
    attention = difference(within(trace.kinds.get("attention", [])), products)
    known, computing = total(products) + total(attention), total(within(trace.computation))
    gaps = piece[1] - piece[0] - computing
    seconds = (total(products), total(attention), max(0.0, computing - known), gaps)
    return tuple(one * SECONDS for one in seconds)
