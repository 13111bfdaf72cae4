"""Testers of two divergences find planted faults of the real engine's steps, and pass right ones.

The engine's own audits bound ε by guesses. These look at all of what a step shows: the least δ at
an ε, and Rényi's divergence, which is what the accounts claim.
"""

import math

import dp_accounting as dp
import numpy as np
import pytest
import torch
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.stats import norm

from dp_clipping.sampling import poisson as sampling
from dp_clipping.step.sums import plain
from tests.support.audit import EXPERIMENTS, Setting, scores
from tests.support.divergences import hockey_stick, mean_bound, renyi

CERTAIN = 1 - 1e-6  # the noise of a test is another with each change of its name
RUNS = 24  # 6000 experiments on each side
EPSILON, ALPHA = 0.5, 2.0
HUGE = 1e6
POISSON = Setting(noise_multiplier=0.6, batches=2, steps=2)
RARELY = Setting(noise_multiplier=0.8, batches=10, steps=3)


def claimed(setting: Setting) -> tuple[float, float]:
    """Returns δ at EPSILON, and Rényi's divergence of order ALPHA, of a run."""
    sigma, rate, steps = setting.noise_multiplier, 1 / setting.batches, setting.steps
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
    delta = dp.pld.PLDAccountant().compose(step, steps).get_delta(EPSILON)
    return delta, float(compute_rdp(q=rate, noise_multiplier=sigma, steps=steps, orders=[ALPHA])[0])


def found(setting: Setting, broken=None) -> tuple[float, float]:
    without, with_canary = (x.numpy() for x in scores(setting, RUNS, broken))
    one, other = (with_canary, without), (without, with_canary)
    return (
        max(hockey_stick(*pair, EPSILON, CERTAIN) for pair in (one, other)),
        max(renyi(*pair, ALPHA, CERTAIN) for pair in (one, other)),
    )


def passes(setting: Setting, least: float | None = None) -> None:
    """`least`: the share of what is claimed that the testers must have learned to see."""
    delta, divergence = found(setting)
    most_delta, most_divergence = claimed(setting)
    assert delta <= most_delta
    assert divergence <= most_divergence
    if least is not None:
        assert delta > 1.5 * least * most_delta
        assert divergence > least * most_divergence


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(canary=HUGE), 0.2),
        (Setting(canary=-0.7, copies=2), 0.2),
        (POISSON, None),
        (RARELY, None),
    ],
    ids=["huge", "units", "poisson", "rarely"],
)
def test_the_engine_passes_both(setting, least):
    passes(setting, least)


def half_of_the_noise(optimizer, _samples, _patch):
    optimizer.noise_multiplier *= 0.5


def coefficients(change):
    """A fault in what multiplies samples, of the right function and its arguments."""

    def broken(optimizer, samples, patch):
        right = plain.coefficients
        patch(plain, "coefficients", lambda *given: change(samples, right, *given))

    return broken


def summed_over_ranks(samples, right, bounds, *rest):
    """Eight ranks, a sample of each experiment on each; an experiment's samples share a slot."""
    slots = torch.zeros(len(bounds), EXPERIMENTS).index_add_(1, samples.experiments, bounds)
    return right(slots[:, samples.experiments], *rest)


def canary_in_every_draw(optimizer, samples, patch):
    right = sampling.included

    def included(*arguments):
        mask = right(*arguments)
        mask[-EXPERIMENTS // 2 :] = True
        return mask

    patch(sampling, "included", included)


FAULTS = {
    "half of the noise": (Setting(), half_of_the_noise),
    "no clipping": (Setting(canary=6.0), coefficients(lambda _, __, x, *___: torch.ones_like(x))),
    "another threshold": (
        Setting(canary=HUGE), coefficients(lambda _, right, x, C, *rest: right(x, 3 * C, *rest)),
    ),
    "each example of a unit is clipped": (
        Setting(canary=HUGE, copies=3, clips_units=False), lambda *_: None,
    ),
    "norms of other samples are added": (  # one huge sample moves the sum by 3.65 C
        Setting(noise_multiplier=1.5, others=(-1.0,) * 7, canary=HUGE),
        coefficients(summed_over_ranks),
    ),
    "a sample is in every draw": (RARELY, canary_in_every_draw),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_both(name):
    setting, fault = FAULTS[name]
    delta, divergence = found(setting, fault)
    most_delta, most_divergence = claimed(setting)
    assert delta > most_delta
    assert divergence > most_divergence


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 3.0])
def test_bounds_of_two_gaussians_hold_and_are_not_loose(shift):
    draw = np.random.default_rng(0)
    p, q = draw.normal(shift, 1, 20_000), draw.normal(0, 1, 20_000)
    delta = norm.cdf(shift / 2 - EPSILON / max(shift, 1e-9))
    delta -= math.exp(EPSILON) * norm.cdf(-shift / 2 - EPSILON / max(shift, 1e-9))
    stick, divergence = hockey_stick(p, q, EPSILON, CERTAIN), renyi(p, q, ALPHA, CERTAIN)
    assert stick <= delta
    assert divergence <= ALPHA * shift**2 / 2
    if shift >= 1:
        assert stick > 0.7 * delta
        assert divergence > 0.3 * min(ALPHA * shift**2 / 2, 4.0)


def test_a_bound_of_a_mean_fails_seldom():
    draw = np.random.default_rng(0)
    rare = (draw.random((2000, 300)) < 0.02).astype(float)
    assert np.mean([mean_bound(x, 0.05, 1) < 0.02 for x in rare]) < 0.05
    assert np.mean([mean_bound(x, 0.05, -1) > 0.02 for x in rare]) < 0.05
