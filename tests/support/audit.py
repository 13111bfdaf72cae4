"""Scores of an empirical audit: training on data with and without one sample.

Runs of the real engine (loader, capture, clipping, noise, optimizer) train a linear model without
bias, whose gradients are known in advance: the network computes w·x and the loss is y·(w·x), so a
sample's gradient is y·x wherever training has got to. Each coordinate of w is an experiment of its
own, with samples whose x is zero elsewhere: some `others`, and in half of the experiments, chosen
at random, a canary. Samples are clipped one by one and noise is drawn coordinate by coordinate, so
experiments of one run do not touch each other, and a run is as good as many with one canary each.
What leaves a run is the parameters; the score of an experiment is how far its coordinate has moved.

What the scores of the two halves tell is in `divergences.py`. That finds mechanisms that are broken
and proves none to be right: it says what these samples show, not what the worst ones would.

Sources: M. Jagielski, J. Ullman and A. Oprea, Auditing differentially private machine learning
(2020); M. Nasr et al., Adversary instantiation: lower bounds for differentially private machine
learning (2021); T. Steinke, M. Nasr and M. Jagielski, Privacy auditing with one (1) training run
(2023), for many canaries in one run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping.optimizer import PrivateOptimizer
from tests.dp_clipping.conftest import skip_all_checks
from tests.support import zoo
from tests.support.engine import build, step

EXPERIMENTS = 500  # of one run


@dataclass(frozen=True)
class Setting:
    """What is audited, and what the accountant is told.

    Attributes:
        noise_multiplier: σ.
        steps: of one run.
        batches: length of the loader; q = 1 / batches.
        others: gradients of the samples that are there in any case, in multiples of C.
        canary: gradient of the canary, in multiples of C; clipped to ±1.
        mode, clipping, clipping_function: of `make_private`.
        copies: examples of a unit, each with the gradient that is given.
        clips_units: the engine is told of them; else it clips each example, which is a mistake.
    """

    noise_multiplier: float = 1.0
    steps: int = 1
    batches: int = 1
    others: tuple[float, ...] = (0.5,)
    canary: float = 1.0
    mode: str = "bookkeeping"
    clipping: str = "flat"
    clipping_function: str = "abadi"
    copies: int = 1
    clips_units: bool = True


@dataclass(frozen=True)
class Samples:
    """The data of one run: sample i has gradient `gradients[i]` in coordinate `experiments[i]`."""

    experiments: Tensor
    gradients: Tensor
    has_canary: Tensor

    def loader(self, batches: int, copies: int) -> DataLoader:
        x = nn.functional.one_hot(self.experiments, EXPERIMENTS) * self.gradients[:, None]
        x = x.repeat_interleave(copies, 0)
        y = torch.ones(len(x), 1)
        return DataLoader(TensorDataset(x, y), batch_size=-(-len(x) // batches))


Break = Callable[[PrivateOptimizer, Samples, Callable], None]
"""How a mechanism differs from that of `make_private`; the last argument patches it for a run."""


def draw_samples(setting: Setting) -> Samples:
    """Others of all experiments, then a canary in half of them."""
    has_canary = torch.rand(EXPERIMENTS).argsort() < EXPERIMENTS // 2
    others = torch.tensor(setting.others)
    everywhere = torch.arange(EXPERIMENTS)
    experiments = [everywhere.repeat_interleave(len(others)), has_canary.nonzero()[:, 0]]
    gradients = [others.repeat(EXPERIMENTS), torch.full((EXPERIMENTS // 2,), setting.canary)]
    return Samples(torch.cat(experiments), torch.cat(gradients), has_canary)


def scores(setting: Setting, runs: int, broken: Break | None = None) -> tuple[Tensor, Tensor]:
    """How far coordinates moved without a canary and with one, in multiples of lr·C / batch.

    Each [runs · EXPERIMENTS / 2], in float64.
    """
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for _ in range(runs):
        samples = draw_samples(setting)
        moved = _one_run(setting, samples, broken)
        found[0].append(moved[~samples.has_canary])
        found[1].append(moved[samples.has_canary])
    return torch.cat(found[0]), torch.cat(found[1])


def _one_run(setting: Setting, samples: Samples, broken: Break | None) -> Tensor:
    """How far each coordinate moved: [EXPERIMENTS]."""
    network = nn.Linear(EXPERIMENTS, 1, bias=False)
    loader = samples.loader(setting.batches, setting.copies)
    units = {"examples_per_unit": setting.copies} if setting.clips_units else {}
    run = build(
        module=network, data_loader=loader, criterion=zoo.Criterion(zoo.product, "mean"),
        lr=loader.batch_size / units.get("examples_per_unit", 1), max_grad_norm=1.0,
        noise_multiplier=setting.noise_multiplier, grad_sample_mode=setting.mode,
        clipping=setting.clipping, clipping_function=setting.clipping_function, **units,
    )  # fmt: skip
    skip_all_checks(run.model)
    with pytest.MonkeyPatch.context() as patches:
        if broken is not None:
            broken(run.optimizer, samples, patches.setattr)
        start = network.weight.detach().clone()
        while run.optimizer.steps < setting.steps:
            for batch in run.loader:
                step(run, batch)
                if run.optimizer.steps == setting.steps:
                    break
    return (start - network.weight.detach())[0].double()


def clopper_pearson(counts: np.ndarray, trials: int, confidence: float) -> np.ndarray:
    """Upper limits of probabilities after `counts` of `trials`."""
    limits = scipy.stats.beta.ppf(confidence, counts + 1, np.maximum(trials - counts, 1))
    return np.where(counts == trials, 1.0, limits)
