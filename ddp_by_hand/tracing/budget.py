"""The budget of a step: what its time went into, beside the same step without communication.

    step = computation + contention + added + exposed + waiting + idle

    computation   what `none`, the floor, computes, or less where this step computed less
    contention    the same kernels take longer here: communication holds multiprocessors and memory
    added         kernels that the floor does not have: copies into buckets, divisions
    exposed       communication while nothing is computed
    waiting       in a collective that a slower rank has not begun, while nothing is computed
    idle          none of these: the host has not launched anything yet

Times are means over ranks and steps. `added` is counted by name: calls beyond the floor's, at the
mean time of that name. A CPU's operators contain each other, so there it is part of contention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import fmean

from dp_clipping.table import aligned

from .overlap import Overlap, overlap
from .trace import Trace

PARTS = ("computation", "contention", "added", "exposed", "waiting", "idle")
NOT_TOLD_APART = "contention includes added operators, which are told apart on a GPU only"


@dataclass(frozen=True)
class Budget:
    """Microseconds per step: its parts, whose sum is `step`; the floor's computation and step."""

    computation: float
    contention: float
    added: float
    exposed: float
    waiting: float
    idle: float
    needed: float
    floor: float

    @property
    def computed(self) -> float:
        """Returns how long it computed, of the floor's time: below 1 if kernels were faster."""
        mine = self.computation + self.contention + self.added
        return mine / self.needed if self.needed else 1.0

    @property
    def is_floor(self) -> bool:
        """Returns whether its step is the floor's, up to rounding of the sum."""
        return isclose(self.step, self.floor, rel_tol=1e-9)

    @property
    def step(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in PARTS}


def budget(traces: Sequence[Trace], floor: Sequence[Trace]) -> Budget:
    """Returns the budget of one implementation; both arguments have one trace per rank.

    Raises:
        ValueError: if a trace does not tell its steps.
    """
    own, base = [_per_step(trace) for trace in traces], [_per_step(trace) for trace in floor]
    busy, needed = (fmean(one.computation for one in ranks) for ranks in (own, base))
    more = max(0.0, busy - needed)
    added = min(more, _added(traces, floor))
    return Budget(
        computation=busy - more,
        contention=more - added,
        added=added,
        exposed=fmean(one.exposed for one in own),
        waiting=fmean(one.waiting for one in own),
        idle=fmean(one.idle for one in own),
        needed=needed,
        floor=fmean(one.span for one in base),
    )


def budgets(traces: Mapping[str, Sequence[Trace]], floors: Mapping[str, str]) -> dict[str, Budget]:
    """Returns the budget of each name whose floor, another name, has traces too."""
    return {
        name: budget(own, traces[floors[name]])
        for name, own in traces.items()
        if floors.get(name) in traces and own and traces[floors[name]]
    }


def describe_budgets(found: Mapping[str, Budget], basis: str) -> list[str]:
    """Returns the table in milliseconds, and what it is made of."""
    names = [part for part in PARTS if part != "added" or tells_added(basis)]
    rows = [["", "step", *names, "x floor"]]
    for name, one in found.items():
        times = one.step, *(one.parts()[part] for part in names)
        rows.append([name, *(f"{us / 1000:.3f}" for us in times), f"{one.step / one.floor:.3f}"])
    return [
        *aligned(rows, [False] + [True] * (len(names) + 2)),
        "",
        f"Basis: {basis}, means over ranks and steps. The step is the sum of the parts.",
        *([f"Here {NOT_TOLD_APART}."] if not tells_added(basis) else []),
        *less_computed(found),
    ]


def less_computed(found: Mapping[str, Budget]) -> list[str]:
    """Returns a sentence about steps that computed for a shorter time than the floor's, if any."""
    less = [
        f"{name} {1 - one.computed:.0%} less" for name, one in found.items() if one.computed < 0.95
    ]
    if not less:
        return []
    return [
        f"Computed for a shorter time than the floor: {', '.join(less)}. Either the machine was "
        "busier while the floor ran, or the kernels are others; contention cannot be told there."
    ]


def tells_added(basis: str) -> bool:
    return "GPU" in basis


def basis_of(traces: Mapping[str, Sequence[Trace]]) -> str:
    return ", ".join(sorted({trace.basis for ranks in traces.values() for trace in ranks}))


def _per_step(trace: Trace) -> Overlap:
    step = overlap(trace).per_step()
    if step is None:
        raise ValueError(f"the trace of rank {trace.rank} does not tell its steps: profile again")
    return step


def _added(traces: Sequence[Trace], floor: Sequence[Trace]) -> float:
    """Returns the time per step of kernels that the floor has not, or not as often."""
    return fmean(
        sum(
            max(0.0, calls - base.get(name, (0.0, 0.0))[0]) * mean
            for name, (calls, mean) in _calls(trace).items()
        )
        for trace, base in zip(traces, map(_calls, floor), strict=False)
    )


def _calls(trace: Trace) -> dict[str, tuple[float, float]]:
    """Returns name → (calls per step, mean time)."""
    steps = overlap(trace).steps
    return {work.name: (work.calls / steps, work.time / work.calls) for work in trace.kernels}
