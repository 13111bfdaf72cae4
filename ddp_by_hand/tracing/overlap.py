"""Measures how much communication is overlapped by computation: the course's main number."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from .intervals import Interval, difference, intersection, total, union
from .trace import Trace

UNEVEN = 1.5  # 90th over 10th percentile of the steps, from which times say little about the method
MUCH_WAITING = 0.1  # of the time
TIMES = ("span", "computation", "communication", "overlapped", "exposed", "waiting", "idle")


@dataclass(frozen=True)
class Overlap:
    """Times of one rank in microseconds; concurrent events count once.

        span            ├────────────────────────────────┤
        computation      ████████████████       ████
        communication            ░░░░░░░░░░░░
        overlapped               ████████           communication ∩ computation
        exposed                          ░░░░       communication − computation
        waiting                              ww     a collective that a slower rank has not begun
        idle            ─                      ─    ──── none of these

    computation + exposed + waiting + idle = span. Exposed communication, here and wherever the word
    is used, is what PROFILING.md defines under that heading. waiting is 0 unless the trace was read
    together with those of the other ranks (`load_traces`): it is part of communication then.

    overlap_fraction is overlapped / communication, None if nothing was communicated.
    phases has the total time of each phase; steps counts the steps in the span, 0 if unknown.
    """

    span: float
    computation: float
    communication: float
    overlapped: float
    exposed: float
    waiting: float
    idle: float
    phases: dict[str, float]
    steps: int
    basis: str

    @property
    def overlap_fraction(self) -> float | None:
        return self.overlapped / self.communication if self.communication else None

    def per_step(self) -> "Overlap | None":
        """Returns averages over the steps; None if the trace does not tell its steps."""
        if not self.steps:
            return None
        averages = {name: getattr(self, name) / self.steps for name in TIMES}
        phases = {name: time / self.steps for name, time in self.phases.items()}
        return Overlap(**averages, phases=phases, steps=1, basis=self.basis)


def overlap(trace: Trace, window: Interval | None = None) -> Overlap:
    """Measures the trace's span, or a window of it such as one of `steps(trace)`."""
    inside = [window or trace.span]
    computation = intersection(trace.computation, inside)
    communication = intersection(trace.communication, inside)
    waiting = intersection(trace.waiting, inside)
    overlapped = intersection(communication, computation)
    return Overlap(
        span=total(inside),
        computation=total(computation),
        communication=total(communication),
        overlapped=total(overlapped),
        exposed=total(difference(communication, computation)),
        waiting=total(difference(waiting, computation)),
        idle=total(difference(inside, union(computation + communication + waiting))),
        phases={name: total(intersection(p, inside)) for name, p in trace.phases.items()},
        steps=sum(inside[0][0] <= start < inside[0][1] for start, _ in steps(trace)),
        basis=trace.basis,
    )


def representative_step(traces: list[Trace]) -> list[Interval]:
    """Returns the step of median length (mean over ranks), the same on every rank; else the span.

    It is the same because the ranks of one step wait for each other: lanes explain each other. If
    some steps communicate and others do not, as those of `diloco`, it is one of the former.
    """
    per_rank = [steps(trace) for trace in traces]
    count = min(len(windows) for windows in per_rank)
    if count == 0:
        return [trace.span for trace in traces]
    lengths = [fmean(w[i][1] - w[i][0] for w in per_rank) for i in range(count)]
    first, its_steps = traces[0], per_rank[0]
    sending = [i for i in range(count) if intersection(first.communication, its_steps[i : i + 1])]
    among = sending or list(range(count))
    median = sorted(among, key=lengths.__getitem__)[(len(among) - 1) // 2]
    return [windows[median] for windows in per_rank]


def hidden_fraction(measured: Iterable[Overlap]) -> float | None:
    """Returns the mean over ranks of how much communication was hidden; None without any."""
    fractions = [m.overlap_fraction for m in measured if m.overlap_fraction is not None]
    return fmean(fractions) if fractions else None


def disturbance(traces: list[Trace]) -> str | None:
    """Returns a sentence if other programs slowed the steps of one implementation, else None.

    All ranks compute the same. Steps of very different length, or a rank that waits long for
    another, are then not the method's doing.
    """
    lengths = sorted(end - start for trace in traces for start, end in steps(trace))
    tenth = len(lengths) // 10
    waiting = fmean(one.waiting / one.span if one.span else 0.0 for one in map(overlap, traces))
    if lengths and lengths[-1 - tenth] > UNEVEN * lengths[tenth]:
        found = f"steps took {lengths[tenth] / 1000:.0f} to {lengths[-1 - tenth] / 1000:.0f} ms"
    elif waiting > MUCH_WAITING:
        found = f"ranks waited {waiting:.0%} of the time for a slower one, though all do the same"
    else:
        return None
    return f"The machine was busy: {found}. Close other programs and profile again."


def steps(trace: Trace) -> list[Interval]:
    """Returns the steps: each from a forward pass to the next step's, the last to the span's end.

    A forward pass opens a step if an optimizer step came since the last one, so several
    forwards whose gradients accumulate are one step.
    """
    forwards = [start for start, _ in trace.phases.get("forward_pass", [])]
    updates = [end for _, end in trace.phases.get("optimizer_step", [])]
    opens = [
        start
        for previous, start in zip([None, *forwards], forwards, strict=False)
        if previous is None or not updates or any(previous < end <= start for end in updates)
    ]
    return list(zip(opens, [*opens[1:], max([trace.span[1], *opens[-1:]])], strict=False))
