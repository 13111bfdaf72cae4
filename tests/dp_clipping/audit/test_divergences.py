"""Testers of two divergences find planted faults of the real engine's steps, and pass right ones.

The engine's own audits bound ε by guesses. These look at all of what a step shows: the least δ at
an ε, and Rényi's divergence, which is what the accounts claim.
"""

import math

import numpy as np
import pytest
import torch
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.stats import norm

from dp_clipping.step.sums import plain
from tests.support.audit import Setting, scores
from tests.support.divergences import hockey_stick, mean_bound, renyi

CERTAIN = 1 - 1e-6  # the noise of a test is another with each change of its name
RUNS = 24  # 6000 experiments on each side
EPSILON, ALPHA = 0.5, 2.0
HUGE = 1e6


def claimed(setting: Setting) -> tuple[float, float]:
    """Returns δ at EPSILON, and Rényi's divergence of order ALPHA, of a step with all samples."""
    sigma = setting.noise_multiplier
    delta = norm.cdf(0.5 / sigma - EPSILON * sigma)
    delta -= math.exp(EPSILON) * norm.cdf(-0.5 / sigma - EPSILON * sigma)
    return delta, float(compute_rdp(q=1.0, noise_multiplier=sigma, steps=1, orders=[ALPHA])[0])


def found(setting: Setting, broken=None) -> tuple[float, float]:
    without, with_canary = (x.numpy() for x in scores(setting, RUNS, broken))
    one, other = (with_canary, without), (without, with_canary)
    return (
        max(hockey_stick(*pair, EPSILON, CERTAIN) for pair in (one, other)),
        max(renyi(*pair, ALPHA, CERTAIN) for pair in (one, other)),
    )


def half_of_the_noise(optimizer, _samples):
    optimizer.noise_multiplier *= 0.5


def change_coefficients(monkeypatch, change):
    right = plain.coefficients
    monkeypatch.setattr(plain, "coefficients", lambda *given: change(right, *given))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(canary=HUGE),
        Setting(canary=-0.7, copies=2),
        pytest.param(Setting(noise_multiplier=2.0), marks=pytest.mark.slow),
    ],
    ids=["huge", "units", "noisy"],
)
def test_the_engine_passes_both(setting):
    delta, divergence = found(setting)
    most_delta, most_divergence = claimed(setting)
    assert delta <= most_delta
    assert divergence <= most_divergence
    if setting.noise_multiplier == 1.0:  # and both have learned what tells the data apart
        assert delta > 0.3 * most_delta
        assert divergence > 0.2 * most_divergence


FAULTS = {
    "half of the noise": (Setting(), half_of_the_noise, None),
    "no clipping": (Setting(canary=6.0), None, lambda _, bounds, *__: torch.ones_like(bounds)),
    "another threshold": (
        Setting(canary=HUGE), None,
        lambda right, bounds, clip_norms, *rest: right(bounds, 3 * clip_norms, *rest),
    ),
    "each example of a unit is clipped": (
        Setting(canary=HUGE, copies=3, clips_units=False), None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_both(monkeypatch, name):
    setting, broken, change = FAULTS[name]
    if change is not None:
        change_coefficients(monkeypatch, change)
    delta, divergence = found(setting, broken)
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
