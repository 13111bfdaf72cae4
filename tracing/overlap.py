"""Measures how much communication is overlapped by computation: the course's main number."""

from dataclasses import dataclass

from .intervals import Interval, difference, intersection, total, union
from .trace import Trace

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
