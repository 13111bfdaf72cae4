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
    synchronising   from the end of backward to the end of `gradient_sync`
    rest            the step without forward, backward, synchronising and the optimizer
    clipped         whether the step clipped gradients
    during          computation and communication from the start of backward to the end of
                    `gradient_sync`, in microseconds
    """

    forward: Work
    backward: list[Work]
    synchronising: float
    optimizer: float
    rest: float
    clipped: bool
    seconds: float
    during: Overlap


def pieces(trace: Trace) -> list[StepPieces]:
    """Returns the trace's whole steps: those with one forward, backward and optimizer step."""
    return [step for window in steps(trace) if (step := _cut(trace, window))]


def undisturbed(trace: Trace) -> list[StepPieces]:
    """Returns the faster half of the steps without clipping: other programs only slow one down."""
    return faster_half((s for s in pieces(trace) if not s.clipped), lambda step: step.seconds)


def faster_half(values: Iterable, key: Callable | None = None) -> list:
    found = sorted(values, key=key)
    return found[: (len(found) + 1) // 2]


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
    synchronising = until - backward[1]
    busy = forward[1] - forward[0] + until - backward[0] + optimizer[1] - optimizer[0]
    return StepPieces(
        forward=_work(trace, forward),
        backward=[_work(trace, piece) for piece in pairwise(edges)],
        synchronising=synchronising * SECONDS,
        optimizer=(optimizer[1] - optimizer[0]) * SECONDS,
        rest=max(0.0, window[1] - window[0] - busy) * SECONDS,
        clipped=bool(inside("gradient_clipping_warmup")),
        seconds=(window[1] - window[0]) * SECONDS,
        during=overlap(trace, (backward[0], until)),
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
