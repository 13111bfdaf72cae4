"""The account of balls-in-bins batches: an upper bound, and a close one."""

import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.integrate import quad
from scipy.stats import norm

from dp_clipping.accounting import balls_in_bins, cyclic
from dp_clipping.accounting.balls_in_bins import Ratio, epochs_of, epsilon, of_steps, on_grid

# with jax_privacy 2.0.0, 200,000 samples of the dominating pair:
# strategy = batch_selection.BallsInBinsSampling(iterations=b, cycle_length=b)
# losses, _ = sample_generation.get_privacy_loss_sample(
#     strategy, sigma, np.array([1.0]), seed=1, positive_sample=.., num_samples=200000)
# values = np.maximum(0, -np.expm1(epsilon - losses)); values.mean(), values.std() / 200000 ** 0.5
SAMPLED = [  # σ, b, ε, δ of (P, Q) and its standard error, δ of (Q, P) and its
    (1.0, 16, 1.0, 6.705e-4, 3.0e-5, 2.706e-5, 3.8e-6),
    (0.5, 16, 2.0, 4.7466e-2, 3.7e-4, 2.0502e-3, 5.3e-5),
    (2.0, 8, 0.2, 1.5190e-2, 1.0e-4, 1.4609e-2, 9.8e-5),
]


def deltas(ratio: Ratio, batches: int, epsilon: float) -> tuple[float, float]:
    """Returns δ of (P, Q) and of (Q, P), for the distribution of b·dP/dQ under Q."""
    s = ratio.values / batches
    adding = float((ratio.mass * np.maximum(0, s - math.exp(epsilon))).sum()) + ratio.lost / batches
    removing = float((ratio.mass * np.maximum(0, 1 - math.exp(epsilon) * s)).sum()) + ratio.zero
    return adding, removing


def delta_of_two(sigma: float, epsilon: float, *, swapped: bool) -> float:
    """Returns δ of an epoch of two batches, by quadrature over the first step's noise."""

    def given(z: float) -> float:  # E (Λ − k)⁺ and E (k − Λ)⁺ of a log-normal Λ with mean 1
        first = math.exp(z / sigma - 0.5 / sigma**2)
        limit = 2 * math.exp(-epsilon if swapped else epsilon) - first
        if limit <= 0:
            return 0.0 if swapped else 1 - limit
        d = (-math.log(limit) + 0.5 / sigma**2) * sigma
        call = norm.cdf(d) - limit * norm.cdf(d - 1 / sigma)
        return call - 1 + limit if swapped else call

    scale = math.exp(epsilon) if swapped else 1.0
    whole, _ = quad(lambda z: given(z) * norm.pdf(z), -12, 12 + 1 / sigma, limit=400, epsabs=1e-14)
    return scale * whole / 2


@pytest.mark.parametrize("sigma", [0.25, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0])
def test_two_batches_are_those_of_a_quadrature(sigma, epsilon):
    for found, swapped in zip(deltas(of_steps(sigma, 2), 2, epsilon), (False, True), strict=True):
        exact = delta_of_two(sigma, epsilon, swapped=swapped)
        assert exact - 1e-12 <= found <= 1.02 * exact + 1e-9


@pytest.mark.parametrize(("sigma", "batches", "at", "removed", "error", "added", "other"), SAMPLED)
def test_an_epoch_is_that_of_the_reference(sigma, batches, at, removed, error, added, other):
    found = deltas(of_steps(sigma, batches), batches, at)
    assert abs(found[0] - removed) < 4 * error + 0.005 * removed
    assert abs(found[1] - added) < 4 * other + 0.005 * added
    more = epsilon([[(sigma, 1 / batches, batches)]], removed + 4 * error)
    assert more < at < epsilon([[(sigma, 1 / batches, batches)]], removed - 4 * error)


@pytest.mark.parametrize("sigma", [0.1, 0.25, 0.5, 1.0, 5.0])
def test_one_batch_is_the_gaussian_mechanism(sigma):
    for epochs in (1, 20):
        exact = get_epsilon_gaussian(sigma / epochs**0.5, 1e-5)
        assert 0.9999999 * exact < epsilon([[(sigma, 1.0, epochs)]], 1e-5) < 1.005 * exact


@pytest.mark.parametrize("sigma", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 3, 40, 1000])
def test_moments_of_a_sum(sigma, steps):
    """Mass and mean are exact, and the second moment is a little larger: n² − n + n exp(1/σ²)."""
    found = of_steps(sigma, steps)
    assert found.mass.min() >= 0
    assert found.mass.sum() + found.zero == pytest.approx(1, rel=1e-12)
    assert (found.mass * found.values).sum() + found.lost == pytest.approx(steps, rel=1e-12)
    assert found.zero < 1e-15
    assert found.lost < 1e-12 * steps
    if sigma > 0.5:  # else it is at values that no δ depends on
        exact = steps**2 - steps + steps * math.exp(sigma**-2.0)
        squares = (found.mass * found.values**2).sum() - steps**2
        assert 1 < squares / (exact - steps**2) < 1.01


def test_steps_of_an_epoch_add_up_to_it():
    spent = [epsilon([[(1.0, 1 / 6, steps)]], 1e-4) for steps in range(1, 14)]
    assert all(less < more + 1e-9 for less, more in pairwise(spent))


def test_epochs_are_those_of_each_key():
    assert list(epochs_of([(1.0, 1 / 4, 9)])) == [(1.0, 4, 4), (1.0, 4, 4), (1.0, 4, 1)]
    two = [(1.0, 1 / 4, 3), (2.0, 1 / 4, 3), (1.5, 1 / 4, 4)]
    assert list(epochs_of(two)) == [(1.0, 4, 4), (1.5, 4, 4), (1.5, 4, 2)]
    one = [(1.0, 1 / 4, 2)]
    assert epsilon([one, one], 1e-5) != epsilon([[(1.0, 1 / 4, 4)]], 1e-5)
    once, twice = (balls_in_bins.losses(1.0, 4, 2, 0.01).self_compose(n) for n in (1, 2))
    assert once.get_epsilon_for_delta(1e-5) < epsilon([one, one], 1e-5)
    assert epsilon([one, one], 1e-5) == pytest.approx(twice.get_epsilon_for_delta(1e-5), rel=0.01)


def test_the_smallest_noise_of_an_epoch_counts():
    changed = epsilon([[(1.0, 1 / 4, 2), (3.0, 1 / 4, 2)]], 1e-5)
    assert changed == epsilon([[(1.0, 1 / 4, 4)]], 1e-5)


def test_little_noise_has_no_amplification():
    history = [(0.1, 1 / 10, 15)]
    assert epsilon([history], 1e-6) == pytest.approx(cyclic.epsilon([history], 1e-6))
    assert epsilon([[(0.25, 1 / 10, 15)]], 1e-6) < cyclic.epsilon([[(0.25, 1 / 10, 15)]], 1e-6)


def test_what_an_fft_gets_wrong_is_charged():
    """δ is lowered by it; where nothing is left, the batch of each unit counts as known."""
    for epochs, delta in ((1000, 1e-11), (1000, 1e-12), (1000, 1e-13)):
        found = epsilon([[(60.0, 1.0, epochs)]], delta)
        exact = get_epsilon_gaussian(60 / epochs**0.5, delta)
        assert exact <= found <= 1.1 * exact
    amplified, known = ([[(2.0, 1 / batches, 1000 * batches)]] for batches in (2, 1))
    assert epsilon(amplified, 1e-11) < epsilon(known, 1e-11)
    assert epsilon(amplified, 1e-13) == epsilon(known, 1e-13)


def test_tails_of_a_step_are_moved_outwards(monkeypatch):
    monkeypatch.setattr(balls_in_bins, "REACH", 1.0)
    sigma = 0.8
    found = balls_in_bins.of_one_step(sigma)
    assert min(found.zero, found.lost) > 0.01
    assert found.mass.sum() + found.zero == pytest.approx(1, rel=1e-12)
    assert found.mass @ found.values + found.lost == pytest.approx(1, rel=1e-12)
    for limit in np.linspace(0.1, 8, 20):
        d = 0.5 / sigma - math.log(limit) * sigma
        exact = norm.cdf(d) - limit * norm.cdf(d - 1 / sigma)
        assert (found.mass * np.maximum(0, found.values - limit)).sum() + found.lost >= exact


@pytest.mark.parametrize("tail", [balls_in_bins.HARDLY, 0.15])
def test_mass_is_moved_outwards_and_keeps_the_mean(tail, monkeypatch):
    monkeypatch.setattr(balls_in_bins, "HARDLY", tail)
    values, mass = np.array([1e-30, 0.7, 1.3, 2.9]), np.array([1e-22, 0.5, 0.4, 0.1])
    given = Ratio(values, mass, 0.0, 0.0, float(values @ mass), 1.0)
    first, found = on_grid(given, 0.5, scale=2.0)
    grid = np.arange(first, first + len(found.values))
    np.testing.assert_allclose(found.values, 2 * np.exp(0.5 * grid))
    assert found.mass.sum() + found.zero == pytest.approx(1)
    assert found.mass @ found.values + found.lost == pytest.approx(given.mean)
    for limit in np.linspace(0.1, 4, 20):  # any convex function grows
        before = (given.mass * np.maximum(0, given.values - limit)).sum()
        after = (found.mass * np.maximum(0, found.values - limit)).sum() + found.lost
        assert after >= before - 1e-15
