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

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from experiments.simulate.step import Contention, Outcome, Times, program_of, run
from lm.exchange import VARIANTS, Network, plan
from lm.shape import Shape, in_block, rates, seconds
from tracing import StepPieces, Trace, Work, collective_seconds, load_traces, undisturbed

LIKE = {"torch_ddp_tuned": "torch_ddp", "ddp_individual_v2": "ddp_individual"}
SLOWEST = 10.0  # a factor of contention that is larger is a fault of measurement


@dataclass(frozen=True)
class Calibration:
    """Holds the measurements of one shape: seconds, and seconds per operation of each kind.

    `slower` is an unprofiled step over the profiled one.
    """

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
        optimizer = self.slower * self.optimizer * shape.gradient_bytes / self.shape.gradient_bytes
        return Times(
            [self.slower * seconds(self.forward, counts) for counts in shape.forward_counts()],
            [self.slower * seconds(self.backward[in_block(name)], shape.backward_counts(name))
             for name in shape.gradients],
            optimizer, self.slower * self.rest, copy=2 / 7 * optimizer / shape.gradient_bytes,
        )  # fmt: skip

    def matched(self, step: float) -> "Calibration":
        """Returns this with times as of an unprofiled step of `none`, of so many seconds."""
        traced = self.simulate("none", self.shape, 1).step
        return replace(self, slower=self.slower * step / traced)

    def simulate(self, variant: str, shape: Shape, ranks: int) -> Outcome:
        """Returns a step; a variant not traced has the contention of its like or `ddp_bucketed`."""
        likes = (variant, LIKE.get(variant), "ddp_bucketed", "ddp")
        known = next(self.contention[v] for v in likes if v in self.contention)
        times = self.times(shape)
        return run(program_of(times, self.network, variant, shape, ranks, known.launch), known)


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
    shape, ranks = Shape.of(runs["none"][0].configuration), len(runs["ddp"])
    steps = {name: [s for trace in own for s in undisturbed(trace)] for name, own in runs.items()}
    floor, names = steps["none"], list(shape.gradients)
    if not floor or any(len(step.backward) != len(names) for step in floor):
        raise ValueError(f"{folder}: a step of none has not {len(names)} gradients; profile again")
    lasted = collective_seconds(runs["ddp"], len(names))  # one all-reduce after another
    samples = [(shape.width * n, s) for n, s in zip(shape.gradients.values(), lasted, strict=True)]
    measured = defaultdict(list)
    for name, *works in zip(names, *(step.backward for step in floor), strict=True):
        measured[in_block(name)].append(rates(_over(median, works), shape.backward_counts(name)))
    found = Calibration(
        shape, ranks,
        rates(_over(median, [step.forward for step in floor]), _over(sum, shape.forward_counts())),
        {name: _over(fmean, own) for name, own in measured.items()},
        median(step.optimizer for step in floor), median(step.rest for step in floor),
        network.fitted(samples, ranks), {},
    )  # fmt: skip
    contention = {v: _contention(found, v, own, floor) for v, own in steps.items() if v != "none"}
    return replace(found, contention=contention)


def _contention(
    found: Calibration, variant: str, own: list[StepPieces], floor: list[StepPieces]
) -> Contention:
    """Compares a variant's backward and synchronisation with those of `none`."""
    layout = plan(variant, found.shape)
    alone = sum(found.network.seconds(layout.kind, n, found.ranks) for n in layout.nbytes)
    copies = layout.copies * found.optimizer * 2 / 7

    def time(steps: list[StepPieces], name: str) -> float:
        return 1e-6 * median(getattr(step.during, name) for step in steps)

    def slower(extra: float) -> float:  # O / (O - extra), at least 1; 1 where nothing was beside
        return beside / max(beside - max(extra, 0.0), beside / SLOWEST) if beside else 1.0

    beside = time(own, "overlapped")
    gaps = [median(sum(work[3] for work in s.backward) for s in steps) for steps in (own, floor)]
    host = gaps[0] - gaps[1]
    if variant == "ddp":  # it waits for each collective: what is left of the synchronisation
        host = median(step.synchronising for step in own) - alone - copies
    return Contention(
        slower(time(own, "computation") - time(floor, "computation") - copies),
        slower(time(own, "communication") - alone), max(0.0, host / max(1, len(layout.nbytes))),
    )  # fmt: skip


def _over(function, works: list) -> tuple:
    return tuple(map(function, zip(*works, strict=True)))
