"""An empirical audit: train on data with and without one sample, and guess which it was.

Runs of the real engine (loader, capture, clipping, noise, optimizer) train a linear model without
bias, whose gradients are known in advance: the network computes w·x and the loss is y·(w·x), so a
sample's gradient is y·x wherever training has got to. Each coordinate of w is an experiment of its
own, with samples whose x is zero elsewhere: some `others`, and in half of the experiments, chosen
at random, a canary. Samples are clipped one by one and noise is drawn coordinate by coordinate, so
experiments of one run do not touch each other, and a run is as good as many with one canary each.
What leaves a run is the parameters; the score of an experiment is how far its coordinate has moved.

Guessing "canary" where the score is above a threshold is wrong with rates α (there was none) and β
(one was missed). An (ε, δ) mechanism allows no guess with α < (1 − δ − β)·e^(−ε), nor with α and β
exchanged, so measured rates bound ε from below. Rates are not probabilities: upper confidence
limits stand in for them (C. Clopper and E. Pearson, 1934), each failing half as often as the bound
may: for a confidence of 95 %, each holds with 97.5 %. The guess is chosen on half of experiments
and judged on the others; otherwise the best of many would look better than it is.

An audit finds mechanisms that are broken. It does not prove that one is right: the bound says what
this guess could tell, not what the best one could.

Sources: M. Jagielski, J. Ullman and A. Oprea, Auditing differentially private machine learning
(2020); M. Nasr et al., Adversary instantiation: lower bounds for differentially private machine
learning (2021); T. Steinke, M. Nasr and M. Jagielski, Privacy auditing with one (1) training run
(2023), for many canaries in one run.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.stats
import torch
from opacus.accountants import create_accountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.optimizer import PrivateOptimizer
from tests.dp_clipping.conftest import skip_all_checks
from tests.support import zoo

DELTA = 1e-2
"""Far above what one would train with: the larger δ, the smaller the ε that holds with it, and the
fewer runs show that it does not. A Gaussian mechanism's noise decides ε at every δ."""

EXPERIMENTS = 500  # of one run
CONFIDENCE = 0.95
THRESHOLDS = 200


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

    def claimed_epsilon(self, delta: float = DELTA) -> float:
        """ε of one run, from Opacus's accountant."""
        accountant = create_accountant("prv")
        accountant.history = [(self.noise_multiplier, 1 / self.batches, self.steps)]
        return accountant.get_epsilon(delta)


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


Break = Callable[[PrivateOptimizer, Samples], None]
"""How a broken mechanism differs from the one that `make_private` returned."""


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
    model, optimizer, criterion, draws = PrivacyEngine(accountant="rdp").make_private(
        module=network,
        optimizer=torch.optim.SGD(
            network.parameters(), lr=loader.batch_size / units.get("examples_per_unit", 1)
        ),
        criterion=zoo.Criterion(zoo.product, "mean"),
        data_loader=loader,
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode=setting.mode,
        clipping=setting.clipping,
        clipping_function=setting.clipping_function,
        **units,
    )
    skip_all_checks(model)
    if broken is not None:
        broken(optimizer, samples)
    start = network.weight.detach().clone()
    while optimizer.steps < setting.steps:
        for inputs, targets in draws:
            criterion(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.steps == setting.steps:
                break
    return (start - network.weight.detach())[0].double()


def audit(
    setting: Setting, runs: int, broken: Break | None = None, confidence: float = CONFIDENCE
) -> float:
    """A lower bound of ε, which is right in at least a share `confidence` of audits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return epsilon_bound(*scores(setting, runs, broken), DELTA, confidence)


def epsilon_bound(
    without: Tensor, with_canary: Tensor, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The lower bound from the scores of as many experiments without a canary as with one."""
    half = len(without) // 2
    clip_norms_of = torch.cat([without[:half], with_canary[:half]]).quantile(
        torch.linspace(0, 1, THRESHOLDS, dtype=without.dtype)
    )
    bounds = _bounds(without[:half], with_canary[:half], clip_norms_of, delta, confidence)
    threshold, way = np.unravel_index(np.argmax(bounds), bounds.shape)
    judged = _bounds(without[half:], with_canary[half:], clip_norms_of, delta, confidence)
    return float(judged[threshold, way])


def _bounds(
    without: Tensor, with_canary: Tensor, clip_norms_of: Tensor, delta: float, confidence: float
) -> np.ndarray:
    """log((1 − δ − β) / α) of each threshold, and with α and β exchanged: [THRESHOLDS, 2].

    0 where that says nothing.
    """
    each = (1 + confidence) / 2
    false_alarms = (without[:, None] > clip_norms_of).sum(0).numpy()
    missed = (with_canary[:, None] <= clip_norms_of).sum(0).numpy()
    alpha = clopper_pearson(false_alarms, len(without), each)
    beta = clopper_pearson(missed, len(with_canary), each)
    ratios = np.stack([(1 - delta - beta) / alpha, (1 - delta - alpha) / beta], axis=1)
    return np.log(ratios.clip(min=1))


def clopper_pearson(counts: np.ndarray, trials: int, confidence: float) -> np.ndarray:
    """Upper limits of probabilities after `counts` of `trials`."""
    clip_norms = scipy.stats.beta.ppf(confidence, counts + 1, np.maximum(trials - counts, 1))
    return np.where(counts == trials, 1.0, clip_norms)
