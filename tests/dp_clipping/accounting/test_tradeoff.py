"""What an attacker can achieve is never understated, and little overstated."""

import math
from functools import partial
from statistics import NormalDist

import pytest
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld import privacy_loss_distribution

from dp_clipping.accounting import balls_in_bins, cyclic, pld, truncated_poisson
from dp_clipping.accounting.tradeoff import curve_of, gaussian_mu, tabulated, true_positive_rate

NORMAL, DELTA = NormalDist(), 1e-5
RATES = (1e-3, 1e-2, 0.1)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 2.0, 4.0])
def test_of_a_gaussian_mechanism_all_is_known(mu):
    """The curve is that of N(0, 1) and N(μ, 1), whose trade-off function has a closed form."""
    curve = curve_of(lambda delta: float(get_epsilon_gaussian(1 / mu, delta)), DELTA)
    deltas = [delta for delta, _ in curve]
    assert deltas == sorted(set(deltas))
    assert deltas[0] == 1e-6
    assert {at for at in (1e-5, 1e-4, 1e-3, 0.01, 0.1) if at < deltas[-1]} <= set(deltas)
    assert mu <= gaussian_mu(curve, DELTA) <= 1.025 * mu
    for rate in RATES:
        exact = NORMAL.cdf(NORMAL.inv_cdf(rate) + mu)
        assert exact * (1 - 1e-9) <= true_positive_rate(curve, rate) <= 1.03 * exact
    assert true_positive_rate(curve, 1.0) == 1


@pytest.mark.parametrize("delta", [1e-18, 1e-40])
def test_mu_covers_the_smallest_deltas(delta):
    """One minus such a rate is 1 in double precision."""
    curve = curve_of(lambda delta: float(get_epsilon_gaussian(1.0, delta)), delta)
    assert 1 <= gaussian_mu(curve, delta) <= 1.1
    assert true_positive_rate([(delta, 0.0)], delta) == 2 * delta


def test_mu_covers_sampled_steps_at_every_delta_from_the_stated_one_on():
    """Held against dp-accounting's own distribution, between the pairs of the curve too."""
    entry = (0.8, 0.02, 300)
    found = gaussian_mu(curve_of(pld.curve([entry], DELTA), DELTA), DELTA)
    exact = privacy_loss_distribution.from_gaussian_mechanism(
        entry[0], sampling_prob=entry[1], value_discretization_interval=1e-3
    ).self_compose(entry[2])
    for k in range(20):
        delta = DELTA * (0.2 / DELTA) ** (k / 19)
        assert exact.get_epsilon_for_delta(delta) <= get_epsilon_gaussian(1 / found, delta) + 1e-9


HISTORY = [[(2.0, 0.125, 16)]]
ACCOUNTS = {
    "pld": (lambda h, delta: pld.epsilon(h[0], delta), lambda h, delta: pld.curve(h[0], delta)),
    "balls_in_bins": (balls_in_bins.epsilon, balls_in_bins.curve),
    "truncated_poisson": tuple(
        partial(f, units=50, max_batch_size=9)
        for f in (truncated_poisson.epsilon, truncated_poisson.curve)
    ),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_curve_is_what_the_account_says_at_each_delta(name):
    epsilon, curve = ACCOUNTS[name]
    found = curve(HISTORY, DELTA)
    for delta in (1e-6, 1e-5, 1e-3, 0.03):
        assert 0.995 * epsilon(HISTORY, delta) <= found(delta) <= 1.01 * epsilon(HISTORY, delta)
    assert found(0.99) == 0


def test_a_delta_below_what_an_fft_may_round_has_a_curve_too():
    for epsilon, curve in ACCOUNTS.values():
        for delta in (1e-16, 1e-3):
            assert 1 <= curve(HISTORY, 1e-16)(delta) / epsilon(HISTORY, delta) <= 1.5


def test_a_table_rounds_epsilon_up():
    at = tabulated(lambda e: [math.exp(-x) for x in e], 10.0, charge=1e-3)
    for delta in (0.002, 0.1, 0.5, 0.99):  # closer to it where ε is small
        exact = -math.log(delta - 1e-3)
        assert exact <= at(delta) <= exact + 0.004 * math.sqrt(exact)
    assert at(1e-4) == math.inf


def test_nothing_released_and_no_noise():
    nothing = curve_of(lambda delta: cyclic.epsilon([], delta), DELTA)
    assert nothing == [(DELTA, 0.0)]
    assert gaussian_mu(nothing, DELTA) == 0
    assert true_positive_rate(nothing, 0.01) == pytest.approx(0.01 + DELTA)
    everything = curve_of(lambda delta: math.inf, DELTA)
    assert gaussian_mu(everything, DELTA) == math.inf
    assert true_positive_rate(everything, 0.01) == 1


@pytest.mark.parametrize("mu", [20.0, 40.0, 70.0])
def test_no_finite_mu_is_too_small_where_epsilon_is_large(mu):
    """Also where ε is stated alike at each δ, as that of tables is."""
    stated = float(get_epsilon_gaussian(1 / mu, DELTA))  # 264, 982 and 2750
    for epsilon in (lambda delta: float(get_epsilon_gaussian(1 / mu, delta)), lambda _: stated):
        found = gaussian_mu(curve_of(epsilon, DELTA), DELTA)
        assert found >= mu
        assert math.isfinite(found) == (stated < 500)
