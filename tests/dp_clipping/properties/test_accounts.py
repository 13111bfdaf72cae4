"""What every account has to be: monotone, a bound of its compositions, above what is known."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dp_clipping.accounting import balls_in_bins, cyclic, pld, truncated_poisson

CLOSE = 1.02  # an account is that near to the truth, so that a smaller one may be that much larger


def truncated(history, delta):
    return truncated_poisson.epsilon([history], delta, units=12, max_batch_size=9)


ACCOUNTS = {
    "pld": pld.epsilon,
    "truncated_poisson": truncated,
    "balls_in_bins": lambda history, delta: balls_in_bins.epsilon([history], delta),
    "cyclic": lambda history, delta: cyclic.epsilon([history], delta),
}
FEWER = settings(max_examples=max(1, settings().max_examples // 4))  # each takes half a second
NAMES = st.sampled_from([*ACCOUNTS])
SIGMAS = st.floats(0.6, 8.0)
BATCHES = st.integers(1, 12)
STEPS = st.integers(1, 40)
DELTAS = st.sampled_from([1e-2, 1e-4, 1e-6, 1e-8])


def delta_of_a_step(sigma: float, rate: float, epsilon: float) -> float:
    """Returns δ at ε > 0 of one Poisson step, the larger one of a unit more and a unit less.

    P = (1 − q) N(0, σ²) + q N(1, σ²) exceeds e^ε N(0, σ²) above x, and N(0, σ²) exceeds e^ε P below
    y: both are where q e^((2x−1)/2σ²) is what they take.
    """
    more = (math.exp(epsilon) - 1 + rate) / rate
    x = 0.5 + sigma**2 * math.log(more)
    removed = rate * norm.sf((x - 1) / sigma) + (1 - rate - math.exp(epsilon)) * norm.sf(x / sigma)
    less = (math.exp(-epsilon) - 1 + rate) / rate
    if less <= 0:
        return removed
    y = 0.5 + sigma**2 * math.log(less)
    added = norm.cdf(y / sigma) * (1 - (1 - rate) * math.exp(epsilon))
    added -= rate * math.exp(epsilon) * norm.cdf((y - 1) / sigma)
    return max(removed, added)


@pytest.mark.slow
@FEWER
@given(NAMES, SIGMAS, BATCHES, STEPS, DELTAS, st.sampled_from(["sigma", "steps", "delta"]))
def test_more_noise_fewer_steps_and_a_larger_delta_cost_less(name, sigma, b, steps, delta, which):
    epsilon = ACCOUNTS[name]
    more = epsilon([(sigma, 1 / b, steps)], delta)
    sigma, steps, delta = {
        "sigma": (1.5 * sigma, steps, delta),
        "steps": (sigma, max(1, steps // 2), delta),
        "delta": (sigma, steps, 10 * delta),
    }[which]
    assert 0 <= epsilon([(sigma, 1 / b, steps)], delta) <= CLOSE * more < math.inf


@FEWER
@given(NAMES, SIGMAS, BATCHES, STEPS, STEPS, DELTAS)
def test_two_parts_cost_no_less_than_one_and_no_more_than_their_sum(
    name, sigma, b, one, two, delta
):
    """Whole epochs, so that the parts of schemes with epochs do not depend on one another."""
    epsilon = ACCOUNTS[name]
    if name in ("balls_in_bins", "cyclic"):
        one, two = b * (1 + one % 5), b * (1 + two % 5)
    whole = epsilon([(sigma, 1 / b, one + two)], delta)
    parts = [epsilon([(sigma, 1 / b, steps)], delta / 2) for steps in (one, two)]
    assert whole <= CLOSE * sum(parts)
    assert CLOSE * whole >= epsilon([(sigma, 1 / b, max(one, two))], delta)


@FEWER
@given(NAMES, SIGMAS, BATCHES, STEPS, DELTAS)
def test_it_is_not_below_what_one_step_costs(name, sigma, b, steps, delta):
    """By the closed form of one Poisson step; where each unit is in each step, of all."""
    found = ACCOUNTS[name]([(sigma, 1 / b, steps)], delta)
    if b == 1:
        sigma = sigma / math.sqrt(steps)
    if found > 0:
        assert delta_of_a_step(sigma, 1 / b, found) <= delta * (1 + 1e-9)
    else:
        assert delta_of_a_step(sigma, 1 / b, 1e-12) <= delta * (1 + 1e-9)
