"""Can an attacker tell more than ε allows? From the real engine not; from broken ones, yes.

The audits here are repeated with every run of the tests, on noise that nobody can fix: a bound that
is wrong once in twenty times would not do. `CERTAIN` lets one be wrong in a hundred thousand.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from dp_clipping.sampling import poisson as sampling
from dp_clipping.step.sums import plain
from tests.dp_clipping.conftest import MODES
from tests.support.audit import DELTA, EXPERIMENTS, Setting, audit, clopper_pearson, epsilon_bound

CERTAIN = 1 - 1e-5
RUNS = 20  # 5000 experiments on each side
HUGE = 1e6

EVERY_SAMPLE = Setting(noise_multiplier=1.0)
POISSON = Setting(noise_multiplier=0.6, batches=2, steps=2)
RARELY = Setting(noise_multiplier=0.8, batches=10, steps=3)


class TestTheMechanism:
    @pytest.mark.parametrize(
        "setting",
        [EVERY_SAMPLE, POISSON, RARELY, Setting(noise_multiplier=0.8, canary=HUGE)],
        ids=["every sample", "poisson", "rarely", "huge canary"],
    )
    def test_no_guess_tells_more_than_epsilon(self, setting):
        assert audit(setting, RUNS, confidence=CERTAIN) <= setting.claimed_epsilon()

    def test_the_guess_is_a_good_one(self):
        bound = audit(EVERY_SAMPLE, 4 * RUNS, confidence=CERTAIN)
        assert bound > 0.3 * EVERY_SAMPLE.claimed_epsilon()  # 0.51 to 0.74 in 30 audits

    @pytest.mark.slow
    @pytest.mark.parametrize("clipping_function", ["abadi", "automatic"])
    @pytest.mark.parametrize("clipping", ["flat", "per_layer"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("noise_multiplier", [0.6, 1.0])
    def test_many_runs_in_every_mode(self, noise_multiplier, mode, clipping, clipping_function):
        setting = Setting(
            noise_multiplier=noise_multiplier,
            canary=HUGE,
            mode=mode,
            clipping=clipping,
            clipping_function=clipping_function,
        )
        bound = audit(setting, 10 * RUNS, confidence=CERTAIN)
        claimed = setting.claimed_epsilon()
        assert 0.5 * claimed < bound <= claimed

    @pytest.mark.slow
    @pytest.mark.parametrize("setting", [POISSON, RARELY], ids=["poisson", "rarely"])
    def test_many_runs_of_poisson_draws(self, setting):
        assert audit(setting, 10 * RUNS, confidence=CERTAIN) <= setting.claimed_epsilon()


def without_clipping(monkeypatch):
    def coefficients(squared_bounds, clip_norms, *_):
        return torch.ones_like(squared_bounds)

    monkeypatch.setattr(plain, "coefficients", coefficients)


def noise_times(factor):
    def broken(optimizer, samples):
        optimizer.noise_multiplier *= factor

    return broken


def norms_summed_over_ranks(monkeypatch):
    """Eight ranks, a sample of each experiment on each; an experiment's samples share a slot."""
    right = plain.coefficients

    def broken(optimizer, samples):
        def coefficients(squared_bounds, *rest):
            slots = torch.zeros(len(squared_bounds), EXPERIMENTS)
            slots.index_add_(1, samples.experiments, squared_bounds)
            return right(slots[:, samples.experiments], *rest)

        monkeypatch.setattr(plain, "coefficients", coefficients)

    return broken


def canary_in_every_draw(monkeypatch):
    right = sampling.included

    def broken(optimizer, samples):
        def included(*arguments):
            mask = right(*arguments)
            mask[-EXPERIMENTS // 2 :] = True
            return mask

        monkeypatch.setattr(sampling, "included", included)

    return broken


class TestBrokenMechanismsAreRejected:
    def test_no_clipping(self, monkeypatch):
        without_clipping(monkeypatch)
        setting = Setting(noise_multiplier=1.0, canary=10)
        assert audit(setting, RUNS, confidence=CERTAIN) > setting.claimed_epsilon()

    def test_half_of_the_noise(self):
        bound = audit(EVERY_SAMPLE, 4 * RUNS, noise_times(0.5), CERTAIN)
        assert bound > EVERY_SAMPLE.claimed_epsilon()

    def test_norms_of_different_samples_summed_over_eight_ranks(self, monkeypatch):
        """Every norm looks too large, and still one huge sample moves the sum by 3.65 C."""
        setting = Setting(noise_multiplier=1.5, others=(-1.0,) * 7, canary=HUGE)
        right = audit(setting, RUNS // 2, confidence=CERTAIN)
        wrong = audit(setting, RUNS // 2, norms_summed_over_ranks(monkeypatch), CERTAIN)
        assert right <= setting.claimed_epsilon() < wrong

    def test_a_sample_that_is_in_every_draw(self, monkeypatch):
        bound = audit(RARELY, RUNS, canary_in_every_draw(monkeypatch), CERTAIN)
        assert bound > RARELY.claimed_epsilon()

    @pytest.mark.slow
    def test_a_fifth_of_the_noise_missing(self):
        bound = audit(EVERY_SAMPLE, 50 * RUNS, noise_times(0.8), CERTAIN)
        assert bound > EVERY_SAMPLE.claimed_epsilon()


class TestTheBound:
    """Of a Gaussian mechanism whose scores are drawn here, so that ε is known exactly."""

    def test_clopper_pearson_is_exact_at_the_ends(self):
        clip_norms = clopper_pearson(np.array([0, 99, 100]), 100, 0.95)
        assert clip_norms == pytest.approx([1 - 0.05 ** (1 / 100), 0.95 ** (1 / 100), 1.0])

    @pytest.mark.parametrize("sigma", [0.6, 1.0, 2.0])
    def test_claimed_epsilon_is_the_gaussian_mechanisms(self, sigma):
        """B. Balle and Y. Wang, Improving the Gaussian mechanism (2018), theorem 8."""
        epsilon = Setting(noise_multiplier=sigma).claimed_epsilon()
        delta = norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
            -0.5 / sigma - epsilon * sigma
        )
        assert delta == pytest.approx(DELTA, rel=0.05)

    @pytest.mark.parametrize("shift", [0.0, 1.0])
    def test_it_is_below_epsilon_in_95_of_100_audits(self, shift):
        claimed = Setting(noise_multiplier=1.0).claimed_epsilon() if shift else 0.0
        draw = torch.Generator().manual_seed(0)
        above = 0
        for _ in range(100):
            without, with_canary = torch.randn(2, 400, generator=draw, dtype=torch.float64)
            above += epsilon_bound(without, with_canary + shift, DELTA) > claimed
        assert above <= 5
