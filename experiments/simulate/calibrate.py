"""Reads from traces what a step computes, and what communication costs it.

Computation is that of `none`, cut where each gradient is final (`tracing.pieces`). Products,
attention, other work and gaps of a piece are scaled to another shape by counts of operations
(`lm.shape`), at the rates that were measured. AdamW passes 7 times over memory of the parameters'
size: it reads gradient, parameter and two moments, and writes the last three. A copy, or a
division, is 2 passes.

Contention is what is left. While a variant communicates for O seconds beside computation, its
computation lasts E longer than that of `none`, and its communication X longer than its collectives
alone. So s = O / (O - E) and c = O / (O - X) are the factors by which they slow each other.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from experiments.simulate.cost import Network
from experiments.simulate.plan import kind_of, plan
from lm.memory import VARIANTS
from lm.shape import Shape
from tracing import StepPieces, Trace, Work, load_traces, pieces

SLOWEST = 10.0  # a factor of contention that is larger is a fault of measurement


@dataclass(frozen=True)
class Contention:
    """Factors by which computation and communication slow each other; host seconds per launch."""

    computation: float
    communication: float
    launch: float


@dataclass(frozen=True)
class Times:
    """Seconds of one step: forward per unit, backward per gradient; `copy` is per byte."""

    forward: list[float]
    backward: list[float]
    optimizer: float
    rest: float
    copy: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on one shape; `slower` is an unprofiled step over the profiled one."""

    shape: Shape
    ranks: int
    forward: Work
    backward: dict[str, Work]
    optimizer: float
    rest: float
    network: Network
    contention: dict[str, Contention]
    slower: float = 1.0

    def times(self, shape: Shape) -> Times:
        """Scales the computation to another shape, by its counts of operations."""
        rates: dict[str, list[Work]] = {}
        for name, work in self.backward.items():
            rate = _rate(work, self.shape.backward_counts(name))
            rates.setdefault(_in_block(name), []).append(rate)
        mean = {name: tuple(map(fmean, zip(*own, strict=True))) for name, own in rates.items()}
        whole = tuple(map(sum, zip(*self.shape.forward_counts(), strict=True)))
        forward = _rate(self.forward, whole)
        size = self.slower * shape.gradient_bytes / self.shape.gradient_bytes
        return Times(
            [self.slower * _product(forward, counts) for counts in shape.forward_counts()],
            [
                self.slower * _product(mean[_in_block(name)], shape.backward_counts(name))
                for name in shape.gradients
            ],
            optimizer=size * self.optimizer,
            rest=self.slower * self.rest,
            copy=2 / 7 * size * self.optimizer / shape.gradient_bytes,
        )

    def matched(self, step: float) -> "Calibration":
        """Returns this with times as of an unprofiled step of `none`, of so many seconds."""
        times = replace(self, slower=1.0).times(self.shape)
        traced = sum(times.forward) + sum(times.backward) + times.optimizer + times.rest
        return replace(self, slower=step / traced)


def calibrate(folder: Path, network: Network) -> Calibration:
    """Reads the traces that `benchmark_ddp.py --profile` wrote into a folder.

    Raises ValueError unless `none` and `ddp` are there, on two ranks or more.
    """
    runs: dict[str, list[Trace]] = {}
    for path in sorted(folder.glob("*_rank_0_trace.json*")):
        traces = load_traces(sorted(folder.glob(path.name.replace("_rank_0_", "_rank_*_"))))
        name = traces[0].configuration.get("implementation")
        if name in VARIANTS and "clipping" not in traces[0].configuration:  # not a private step
            runs[name] = traces
    if not {"none", "ddp"} <= runs.keys() or len(runs["ddp"]) < 2:
        raise ValueError(
            f"{folder}: needs traces of none and ddp on two ranks or more, has "
            f"{', '.join(runs) or 'no trace'}; run benchmark_ddp.py --profile "
            f"--profile-output-dir {folder}"
        )
    shape = Shape.of(runs["none"][0].configuration)
    steps = {name: [s for trace in own for s in _undisturbed(trace)] for name, own in runs.items()}
    floor, sizes = steps["none"], [shape.width * numel for numel in shape.gradients.values()]
    if not floor or any(len(step.backward) != len(sizes) for step in floor):
        raise ValueError(f"{folder}: a step of none has not {len(sizes)} gradients; profile again")
    backward = [_median([step.backward[i] for step in floor]) for i in range(len(sizes))]
    found = Calibration(
        shape, len(runs["ddp"]), _median([step.forward for step in floor]),
        dict(zip(shape.gradients, backward, strict=True)),
        optimizer=median(step.optimizer for step in floor),
        rest=median(step.rest for step in floor),
        network=network.fitted(_all_reduces(runs["ddp"], sizes), len(runs["ddp"])), contention={},
    )  # fmt: skip
    contention = {v: _contention(found, v, own, floor) for v, own in steps.items() if v != "none"}
    return replace(found, contention=contention)


def _undisturbed(trace: Trace) -> list[StepPieces]:
    """Returns the faster half of the steps without clipping: other programs only slow one down."""
    return _lower_half([step for step in pieces(trace) if not step.clipped], lambda s: s.seconds)


def _lower_half(values: list, key=None) -> list:
    return sorted(values, key=key)[: (len(values) + 1) // 2]


def _all_reduces(traces: list[Trace], sizes: list[int]) -> list[tuple[float, float]]:
    """Returns (bytes, seconds) of each all-reduce of `ddp`: one per gradient, one after another.

    Each lasts from when the last rank joins to its end, in the mean over ranks.
    """
    calls = [sorted(i for own in trace.collectives.values() for i in own) for trace in traces]
    if len(set(map(len, calls))) > 1 or len(calls[0]) % len(sizes):
        raise ValueError(f"the traces of ddp have not {len(sizes)} all-reduces per step")
    lasted = [
        fmean(max(1.0, end - max(start for start, _ in ranks)) for _, end in ranks)
        for ranks in zip(*calls, strict=True)
    ]
    number = len(sizes)
    return [(size, 1e-6 * median(_lower_half(lasted[i::number]))) for i, size in enumerate(sizes)]


def _contention(
    found: Calibration, variant: str, own: list[StepPieces], floor: list[StepPieces]
) -> Contention:
    """Compares a variant's backward and synchronisation with those of `none`."""
    layout = plan(variant, found.shape)
    kind = kind_of(variant)
    alone = sum(found.network.seconds(kind, nbytes, found.ranks) for nbytes in layout.nbytes)
    copies = layout.copies * found.optimizer * 2 / 7

    def time(steps: list[StepPieces], name: str) -> float:
        return 1e-6 * median(getattr(step.during, name) for step in steps)

    def gaps(steps: list[StepPieces]) -> float:
        return median(sum(work[3] for work in step.backward) for step in steps)

    beside = time(own, "overlapped")
    more = time(own, "computation") - time(floor, "computation") - copies
    host = gaps(own) - gaps(floor)
    if variant == "ddp":  # it waits for each collective: what is left of the synchronisation
        host = median(step.synchronising for step in own) - alone - copies
    longer = time(own, "communication") - alone
    return Contention(
        *(_slower(beside, extra) for extra in (more, longer)),
        launch=max(0.0, host / max(1, len(layout.nbytes))),
    )


def _slower(beside: float, extra: float) -> float:
    """Returns O / (O - extra), at least 1; 1 where nothing was beside."""
    return beside / max(beside - max(extra, 0.0), beside / SLOWEST) if beside else 1.0


def _in_block(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def _median(works: list[Work]) -> Work:
    return tuple(map(median, zip(*works, strict=True)))


def _rate(work: Work, counts: tuple) -> Work:
    """Returns seconds per operation. Time of a kind that should have none counts as other work."""
    unexpected = sum(w for w, c in zip(work, counts, strict=True) if not c)
    whole = (*work[:2], work[2] + unexpected, work[3])
    return tuple(w / c if c else 0.0 for w, c in zip(whole, counts, strict=True))


def _product(rates: Work, counts: tuple) -> float:
    return sum(r * c for r, c in zip(rates, counts, strict=True))
