"""Reads from traces what a step computes, and what communication costs it.

Computation is that of `none`, cut where each gradient is final (`tracing.pieces`), and scaled to
another shape (`lm.shape`). In a mixed run `fsdp` casts no weights, and its residual stream is
narrower: its other work is `lean` times that of `none`.

Products and attention are the same kernels in every variant. While those of a variant ran beside
communication for P seconds, they took E longer than in `none`. Its collectives took X longer than
alone, O seconds of them beside computation. So s = P / (P - E) and c = O / (O - X) are the factors
by which computation and communication slow each other. Time in which a rank did nothing, or waited
for another, and which `none` has not, is the host's: it is divided among the collectives.

The profiler slows the host. Steps measured without it correct that, see `Calibration.matched`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from ddp_by_hand.experiments.simulate.step import Outcome, program_of, run
from ddp_by_hand.lm.exchange import VARIANTS, Contention, Network, factor, plan
from ddp_by_hand.lm.memory import SHARDED
from ddp_by_hand.lm.shape import Computation, Shape, Times
from ddp_by_hand.tracing import StepPieces, collective_seconds, load_runs, slowdown, undisturbed

LIKE = {"torch_ddp_tuned": "torch_ddp", "ddp_individual_v2": "ddp_individual", "zero2": "zero1",
        "diloco": "ddp"}  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """Holds the measurements of one shape: seconds, and seconds per operation of each kind.

    `slower` is an unprofiled step over the profiled one, `shared` the part by which each further
    rank of a host slows computation, and `lean` the other work of `fsdp` over that of `none`.
    """

    ranks: int
    computation: Computation
    network: Network
    contention: dict[str, Contention]  # of the variants that are known
    slower: float = 1.0
    shared: float = 0.0
    lean: float = 1.0
    faster: tuple[str, ...] = ()  # variants whose traced step was shorter than that of `none`
    every: int = 50  # steps of `diloco`, of which the last one has the exchange

    @property
    def shape(self) -> Shape:
        return self.computation.shape

    def times(self, variant: str, shape: Shape, ranks: int) -> Times:
        """Returns what a variant computes in a step."""
        lean = self.lean if variant == "fsdp" else None
        slower = self.slower * (1 + self.shared * (self.network.local(ranks) - 1))
        return self.computation.scaled(shape, lean).times(slower)

    def simulate(self, variant: str, shape: Shape, ranks: int) -> Outcome:
        """Returns a step of so many ranks; of `diloco` the mean of a round."""
        times, known = self.times(variant, shape, ranks), self.contention_of(variant)
        found = run(program_of(times, self.network, variant, shape, ranks, known.launch), known)
        if variant != "diloco":
            return found
        return found.mean(self.simulate("none", shape, ranks), self.every)

    def contention_of(self, variant: str) -> Contention:
        """Returns that of a variant that is known, otherwise of its like or of `ddp_bucketed`."""
        return self.contention[self.known(variant)]

    def known(self, variant: str) -> str:
        """Returns the variant whose contention a variant is given: itself where it was measured."""
        likes = (variant, LIKE.get(variant, ""), "ddp_bucketed", "ddp")
        return next(v for v in likes if v in self.contention)

    def doubts(self, measured: Mapping[str, float]) -> list[str]:
        """Returns why predictions may be far off: other programs' traces, and steps not matched.

        Args:
            measured: variant -> seconds, of the shape and ranks of the traces.
        """
        found = [
            f"{name} took less time than none in the traces, so other programs ran beside none: "
            "trace again on a quiet machine" for name in self.faster
        ]  # fmt: skip
        for name in VARIANTS[1:]:
            step = self.simulate(name, self.shape, self.ranks).step
            if name in measured and abs(step / measured[name] - 1) > 0.02:
                found.append(
                    f"{name}: no contention gives the {1e3 * measured[name]:.1f} ms measured at "
                    f"the traces' sizes; predicted are {1e3 * step:.1f} ms"
                )
        return found

    def matched(self, measured: Mapping[int, Mapping[str, float]]) -> "Calibration":
        """Returns this as of unprofiled steps at its shape: ranks -> variant -> seconds.

        `none` tells computation: t(n) = t(1) (1 + `shared` (n - 1)) with n ranks on a host. Each
        other variant gets that part of its costs at which its step is the measured one.
        """
        if not measured:
            raise ValueError(f"--results: none is of the traces' shape, {self.shape}")
        few, many = (self.network.local(n) for n in (min(measured), max(measured)))
        first, more = measured[min(measured)]["none"], few < many
        ratio = measured[max(measured)]["none"] / first
        shared = max(0.0, ratio - 1) / (many - 1 - ratio * (few - 1)) if more else self.shared
        alone = first / (1 + shared * (few - 1))
        traced = replace(self, slower=1.0, shared=0.0).simulate("none", self.shape, 1).step
        found = replace(self, slower=alone / traced, shared=shared)

        def is_late(part: int, variant: str, step: float) -> bool:
            known = {variant: self.contention_of(variant).at(part / 100)}
            there = replace(found, contention=known)
            return there.simulate(variant, self.shape, self.ranks).step >= step

        steps = {v: s for v, s in measured.get(self.ranks, {}).items() if v in VARIANTS[1:]}
        parts = {v: bisect_left(range(1000), True, key=lambda part, v=v, s=s: is_late(part, v, s))
                 for v, s in steps.items()}  # fmt: skip
        known = {v: self.contention_of(v).at(part / 100) for v, part in parts.items()}
        return replace(found, contention=self.contention | known)


def calibrate(folders: Sequence[Path], network: Network) -> Calibration:
    """Reads the traces that `benchmark_ddp.py --profile` wrote into folders, of one shape.

    Raises ValueError unless `none` is there, and `ddp` on two ranks or more. If `none` was traced
    on fewer ranks too, the difference tells how ranks slow each other on a host.
    """
    runs = load_runs(folders)
    ranks = max((n for name, n in runs if name == "ddp"), default=0)
    alone = {n: own for (name, n), own in runs.items() if name == "none"}
    shapes = {Shape.of(own[0].configuration) for own in runs.values()}
    if not alone or ranks < 2 or len(shapes) > 1:
        raise ValueError(
            f"{' '.join(map(str, folders))}: needs traces of one shape: of none, for computation, "
            "and of ddp on two ranks or more, for collectives. Found are, of "
            f"{len(shapes)} shapes, {', '.join(f'{v} on {n}' for v, n in runs) or 'no traces'}. "
            "Run benchmark_ddp.py --profile --implementations none ddp, and give its folder too"
        )
    (shape,) = shapes
    steps = {run: [s for trace in own for s in undisturbed(trace)] for run, own in runs.items()}
    floor, sizes = steps["none", ranks if ranks in alone else min(alone)], shape.gradients.values()
    if not floor or any(len(step.backward) != len(sizes) for step in floor):
        raise ValueError(f"{folders[0]}: a step of none has not {len(sizes)} gradients")
    lasted = collective_seconds(runs["ddp", ranks], len(sizes))  # one all-reduce after another
    samples = [(shape.width * n, s) for n, s in zip(sizes, lasted, strict=True)]
    works = (np.median([getattr(s, part) for s in floor], axis=0).tolist()
             for part in ("forward", "backward", "optimizer", "rest"))  # fmt: skip
    found = Calibration(ranks, Computation(shape, *works), network.fitted(samples, ranks), {})
    # Nothing is computed beside what diloco sends, in one of many steps.
    own = {v: s for (v, n), s in steps.items() if n == ranks and v not in ("none", "diloco")}
    found = replace(found, contention={v: _contention(found, v, s, floor) for v, s in own.items()})
    if "fsdp" in own:
        found = replace(found, lean=_lean(found, own["fsdp"]))
    lasts = {v: median(s.seconds for s in traced) for v, traced in own.items()}
    least = 0.95 * median(s.seconds for s in floor)
    faster = (v for v, seconds in lasts.items() if seconds < least and v not in SHARDED)
    found = replace(found, faster=tuple(faster))
    profiled = {n: {"none": median(s.seconds for s in steps["none", n])} for n in alone}
    return found.matched(profiled) if len(profiled) > 1 else found


def _contention(
    found: Calibration, variant: str, own: list[StepPieces], floor: list[StepPieces]
) -> Contention:
    times, seen = found.times(variant, found.shape, found.ranks), slowdown(own, floor)
    program = program_of(times, found.network, variant, found.shape, found.ranks, launch=0.0)
    sends = [amount for what, amount in program if what == "send"]
    return Contention(
        factor(seen.beside, seen.longer), factor(seen.overlapped, seen.communicating - sum(sends)),
        max(0.0, seen.idle / len(sends)),
    )  # fmt: skip


def _lean(found: Calibration, own: list[StepPieces]) -> float:
    """Compares other work of `fsdp`, without what contention added, with that of `none`."""
    layout, slowed = plan("fsdp", found.shape), 1 - 1 / found.contention["fsdp"].computation
    work = median(s.forward[2] + sum(w[2] for w in s.backward) - slowed * s.beside[2] for s in own)
    copied = layout.copies * sum(layout.nbytes) * (1 + 2 / found.ranks)  # slices, gathered twice
    return found.computation.leanness(work, 2 * copied)
