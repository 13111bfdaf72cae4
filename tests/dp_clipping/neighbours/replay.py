"""Records the steps of a run on neighbouring data, with the same randomness, and compares them.

A `Row` is a private run. It is made again, from the same entropy, on data of which one unit has
another loss or is missing; parameters stay as they are, and so does what earlier steps released.
Then the sum before noise may move by at most C, and what is added may not move at all. What one
unit adds beside others is what it adds where theirs are zero.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dp_clipping import BatchMemoryManager, PrivacyEngine
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.secure.certificate import grid_of
from dp_clipping.sampling.schemes import FIXED
from tests.dp_clipping.conftest import skip_all_checks
from tests.support import seeds

HOSTILE = -1000.0
SEED = 5
ROUNDING = 64 * torch.finfo(torch.float32).eps  # of sums, in C


def loss_of(run: SimpleNamespace, x: Any, y: Any) -> Any:
    return run.criterion(run.model(x), y)


@dataclass(frozen=True)
class Row:
    """A private run of a few steps.

    Attributes:
        build: makes the network.
        samples: the inputs and targets of each example, which are stacked to batches.
        arguments: further ones of `make_private`, made anew for each run.
        units: the unit of each example; default: each is one.
        removed: a unit, and what its loss is multiplied by while it is there.
        loss: of a run and a batch.
        parts: what divides batches: arguments of `BatchMemoryManager`, or `"by hand"`.
        epochs: that are trained.
        secure: `secure_mode` of the engine.
        is_exact: a hostile unit adds C, no less.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: Sequence[Any]
    arguments: Callable[[], dict[str, Any]]
    units: Sequence[int] | None = None
    removed: Sequence[tuple[int, float]] = ()
    loss: Callable[[SimpleNamespace, Any, Any], Any] = loss_of
    parts: Mapping[str, Any] | str | None = None
    epochs: int = 1
    secure: bool = False
    is_exact: bool = True


@dataclass
class Step:
    """Holds what a step has: its sum before noise, and all that it releases.

    Attributes:
        total, released: [n] float64; the second one is `.grad` times the divisor.
        clip_norms: C of each group, before the step.
        after: the same after it.
        rows: in its batch.
    """

    total: Tensor
    released: Tensor
    clip_norms: list[float]
    sensitivity: float
    after: list[float] = field(default_factory=list)
    rows: int = 0

    @property
    def noise(self) -> Tensor:
        return self.released - self.total


class Weighted(Dataset):
    """Examples with what their losses are multiplied by."""

    def __init__(self, samples: Sequence[Any], factors: Sequence[float]) -> None:
        self.samples, self.factors = samples, factors

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[Any, Any, float]:
        return (*self.samples[i], self.factors[i])


def make(row: Row, factors: Mapping[int, float | None]) -> SimpleNamespace:
    """Returns what `make_private` does; `factors` of units, None for one that is missing."""
    units = row.units or range(len(row.samples))
    given = row.arguments()
    if given.get("sampling") == "cyclic":  # whose neighbours have an empty unit
        factors = {unit: factor or 0.0 for unit, factor in factors.items()}
    there = [i for i, unit in enumerate(units) if factors.get(unit, 1.0) is not None]
    data = Weighted(
        [row.samples[i] for i in there], [factors.get(units[i], 1.0) for i in there]
    )  # fmt: skip
    if given.get("unit_ids") is not None:
        given["unit_ids"] = [given["unit_ids"][i] for i in there]
    seeds.begin_test(SEED)  # keys too
    network = row.build()
    engine = PrivacyEngine(accountant="rdp", secure_mode=row.secure)
    model, optimizer, criterion, loader = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=given.pop("batch_size", len(row.samples))), **given,
    )  # fmt: skip
    skip_all_checks(optimizer.model)
    return SimpleNamespace(
        engine=engine, model=model, optimizer=optimizer, criterion=criterion, loader=loader
    )  # fmt: skip


def recorded(run: SimpleNamespace) -> list[Tensor]:
    """Returns a list that gets each sum which the run is going to add noise to."""
    source, sums = run.optimizer.noise.source, []
    add = source.add

    def noted(totals: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        sums.append(torch.cat([total.double().flatten() for total in totals]))
        return add(totals, *args, **kwargs)

    source.add = noted
    return sums


def batches_of(row: Row, run: SimpleNamespace) -> Iterator[tuple[Any, Any, Tensor, int]]:
    """Yields inputs, targets, factors and the number of rows that are no padding."""
    for _ in range(row.epochs):
        if isinstance(row.parts, Mapping):
            parts = BatchMemoryManager(
                data_loader=run.loader, optimizer=run.optimizer, **dict(row.parts)
            )
            with parts as loader:
                for batch in loader:
                    yield *batch, loader.real if row.parts.get("pad_batches") else len(batch[2])
            continue
        for x, y, factors in run.loader:
            if row.parts == "by hand":  # whole units, in two parts
                each = run.optimizer.model.examples_per_unit
                half = len(factors) // each // 2 * each
                run.optimizer.signal_skip_step(True)
                if half:
                    yield x[:half], y[:half], factors[:half], half
                run.optimizer.signal_skip_step(False)
                x, y, factors = x[half:], y[half:], factors[half:]
            yield x, y, factors, len(factors)


def replay(
    row: Row, factors: Mapping[int, float | None], released: Sequence[Step] = ()
) -> list[Step]:
    """Returns the steps of a run; `released`: those of another, from whose outputs each begins."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "poisson_sampling=False")
        run = make(row, factors)
    private, steps, rows = run.optimizer.model, [], 0
    sums, adaptive = recorded(run), run.optimizer.adaptive_threshold
    before = private.thresholds.clip_norms()
    for x, y, weights, real in batches_of(row, run):
        if adaptive is not None and rows == 0 and released:
            before = released[len(steps)].clip_norms
            adaptive.clip_norms = list(before)
            run.optimizer.max_grad_norm = adaptive.max_grad_norm
        rows += real
        loss = row.loss(run, x, y)
        (loss * weights.to(loss.dtype)).backward()
        if not run.optimizer.pre_step():
            run.optimizer.step()
            run.optimizer.zero_grad()
            continue
        is_mean = run.optimizer.loss_reduction == "mean"
        grads = [p.grad.double().flatten() for p in private.capture.parameters]
        grads = torch.cat(grads) * (run.optimizer.expected_batch_size if is_mean else 1.0)
        steps.append(Step(
            sums.pop(), grads, before, run.optimizer.step_state.sensitivity, rows=rows
        ))  # fmt: skip
        assert not sums, "noise was added twice"
        run.optimizer.step()
        run.optimizer.zero_grad()
        steps[-1].after = before = private.thresholds.clip_norms()
        rows = 0
    return steps


def check(row: Row) -> None:
    """Fails unless a unit moves the sums of a row's run as it may, and moves no noise."""
    given = row.arguments()
    everyone, follows = set(row.units or range(len(row.samples))), "adaptive_threshold" in given
    largest, missing = 0.0, {}
    for unit, factor in row.removed:
        having = replay(row, {unit: factor})
        if unit not in missing or follows:
            missing[unit] = replay(row, {unit: None}, having)
        moved = [a.total - b.total for a, b in zip(having, missing[unit], strict=True)]
        alone = []
        if factor == HOSTILE:
            alone = replay(row, dict.fromkeys(everyone, 0.0) | {unit: factor}, having)
            assert len(alone) == len(having)
        for n, (a, b, difference) in enumerate(zip(having, missing[unit], moved, strict=True)):
            where = f"{row.name}, unit {unit} times {factor}, step {n}"
            is_cut = is_truncated(given, a, b)
            check_step(row, a, b, is_cut, where)
            check_pair(given, a, b, difference, 2 if is_cut else 1)
            rounding = ROUNDING * a.sensitivity
            if math.isnan(factor) and not is_cut:
                assert difference.norm() <= rounding, f"{where}: not finite, and not left out"
            if alone and not is_cut:
                assert (difference - alone[n].total).norm() <= rounding, f"{where}: seen by others"
            if factor == HOSTILE:
                largest = max(largest, float(difference.norm()) / a.sensitivity)
        check_all(given, having, moved)
        for one, other in itertools.pairwise(having if given.get("noise_multiplier") else ()):
            again = (one.noise - other.noise).norm() / other.noise.norm()
            assert again >= 0.5, f"{row.name}: two steps have the same noise"
    if any(factor == HOSTILE for _, factor in row.removed):
        assert largest >= (0.98 if row.is_exact else 0.3), f"{row.name}: nothing was clipped"


def check_step(row: Row, a: Step, b: Step, is_cut: bool, where: str) -> None:
    """`is_cut`: another unit may be in the place of the one that came."""
    moved = (a.total - b.total).norm() / a.sensitivity
    assert moved <= (2 if is_cut else 1) * (1 + ROUNDING), f"{where}: moved by {moved} C"
    sigma = row.arguments().get("noise_multiplier", 0.0)
    exact = 4 * torch.finfo(torch.float32).eps * float(a.released.abs().max())
    if row.secure:  # sums are rounded to a grid
        exact += grid_of(sigma * a.sensitivity, len(a.total))
    assert (a.noise - b.noise).abs().max() <= exact, f"{where}: other noise"
    least = 0.5 * sigma * a.sensitivity * math.sqrt(len(a.noise))
    assert a.noise.norm() >= least, f"{where}: too little noise"


def is_truncated(given: Mapping[str, Any], a: Step, b: Step) -> bool:
    """Returns whether both batches may have been cut to their cap."""
    most = given.get("max_batch_size")
    each = given.get("examples_per_step") or given.get("examples_per_unit", 1)
    return most is not None and a.rows == b.rows == most * each * given.get("views", 1)


def check_pair(given: Mapping[str, Any], a: Step, b: Step, moved: Tensor, times: int) -> None:
    """With an adaptive threshold, sum and counts together cost what σ says."""
    adaptive, sigma = given.get("adaptive_threshold"), given.get("noise_multiplier", 0.0)
    if adaptive is None or given.get("sampling") == "cyclic":  # which no proof covers
        return
    counts = [
        (math.log(after_b / before) - math.log(after_a / before))
        / adaptive.learning_rate * adaptive.expected_batch_size
        for before, after_a, after_b in zip(a.clip_norms, a.after, b.after, strict=True)
    ]  # fmt: skip
    of_sum = float(moved.norm()) / a.sensitivity / adaptive.gradient_noise_multiplier(sigma)
    of_counts = math.hypot(*counts) / adaptive.count_std
    assert max(map(abs, counts)) <= 0.5 * times * (1 + 1e-6)
    assert math.hypot(of_sum, of_counts) <= times / sigma * (1 + 1e-5)


def check_all(given: Mapping[str, Any], having: list[Step], moved: list[Tensor]) -> None:
    """Over all steps: a unit is in one of an epoch, and correlated noise has its sensitivity."""
    steps, batches = len(moved), given.get("steps")
    if given.get("sampling") not in FIXED:
        return
    assert steps > batches, "or epochs are not seen"
    assert sum(bool(one.norm()) for one in moved) <= -(-steps // batches)
    noise = given.get("noise_mechanism")
    if isinstance(noise, CorrelatedNoise):
        noise = noise.in_epochs_of(batches)
        weights = noise.weights(steps)
        inverse: list[Tensor] = []  # of W, row by row, on what moved
        for t, one in enumerate(moved):
            earlier = [w * inverse[t - j] for j, w in enumerate(weights) if 1 <= j <= t]
            inverse.append(one / having[0].sensitivity - sum(earlier, torch.zeros(())))
        total = math.sqrt(sum(float(x.square().sum()) for x in inverse))
        assert total <= noise.sensitivity(steps, batches) * (1 + 1e-5)
