"""ε of the default accountant: an upper bound, close to the truth, for any σ in bounded time."""

import math
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from opacus.accountants import IAccountant, PRVAccountant

from dp_clipping import PrivacyEngine
from dp_clipping.accounting import pld
from dp_clipping.accounting.pld import PLDAccountant, epsilon, merged

# σ, q, steps, and ε at δ = 1e-5 by dp-accounting 0.6.0's optimistic and pessimistic estimates at an
# interval of 1e-4 (1e-3 below σ = 0.15): python -m tests.support.pld_references
REFERENCES = [
    (0.1, 0.001, 100, 156.766, 156.864), (0.1, 0.01, 1000, 1194.8, 1195.74),
    (0.5, 0.001, 10000, 4.80433, 5.22683), (0.5, 0.01, 10000, 42.862, 43.3665),
    (1, 0.001, 1000, 0.0988537, 0.148956), (1, 0.01, 1000, 1.77824, 1.82824),
    (1, 0.1, 1000, 25.1546, 25.2046), (2, 0.001, 10000, 0, 0.173847),
    (2, 0.01, 10000, 1.66273, 2.16277), (2, 0.1, 10000, 35.5037, 36.0037),
    (5, 0.001, 10000, 0, 0.060792), (5, 0.01, 10000, 0.236312, 0.736397),
    (5, 0.1, 10000, 9.64293, 10.1429), (10, 0.001, 10000, 0, 0.0297636),
    (10, 0.01, 10000, 0, 0.34251), (10, 0.1, 10000, 3.89637, 4.3964),
    (20, 0.001, 10000, 0, 0.0166827), (20, 0.01, 10000, 0, 0.160867),
    (20, 0.1, 10000, 1.49613, 1.99617), (50, 0.001, 10000, 0, 0.00970372),
    (50, 0.01, 10000, 0, 0.0599893), (50, 0.1, 10000, 0.225916, 0.726003),
]  # fmt: skip

GRID = [
    (sigma, rate, steps)
    for sigma in (0.05, 0.1, 0.15, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    for rate in (0.001, 0.01, 0.1)
    for steps in (100, 1_000, 10_000, 100_000)
]


FEW = [*product((0.05, 0.5, 20.0), (0.001, 0.1), (100, 100_000))]


def test_it_is_between_the_estimates_of_dp_accounting():
    for sigma, rate, steps, low, high in REFERENCES:
        assert low <= epsilon([(sigma, rate, steps)], 1e-5) <= 1.01 * high, (sigma, rate, steps)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [FEW, GRID], ids=["few", "all"])
def test_it_takes_a_second_and_a_half_at_most_and_grows_as_it_must(grid):
    """With less noise, more steps and more sampling."""
    epsilon([(1.0, 0.1, 1)], 1e-5)  # imports
    found = {}
    for entry in grid:
        begin = time.process_time()
        found[entry] = epsilon([entry], 1e-5)
        assert time.process_time() - begin < 1.5, entry
    for entry, other in product(grid, grid):
        if entry[0] <= other[0] and entry[1] >= other[1] and entry[2] >= other[2]:
            assert math.inf > found[entry] >= found[other] > 0


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8, 1e-10, 1e-12, 1e-14])
@pytest.mark.parametrize(("sigma", "steps"), [(30, 1_000), (300, 100_000), (30, 100_000), (2, 1)])
def test_where_each_step_has_all_units_it_is_known_exactly(sigma, steps, delta):
    """Never below the truth, also for a δ that is smaller than what an FFT gets wrong."""
    exact = get_epsilon_gaussian(sigma / math.sqrt(steps), delta)
    more = 1.006 if delta > 1e4 * steps * pld.ROUNDING else 1.07
    assert exact <= epsilon([(sigma, 1.0, steps)], delta) <= more * exact


def test_a_curve_is_charged_what_an_fft_gets_wrong():
    history, delta = [(300, 1.0, 100_000)], 1.2e-10  # of which three quarters are charged
    spent = epsilon(history, delta)
    assert spent <= pld.curve(history, delta)(delta) <= 1.002 * spent


@pytest.mark.parametrize("sigma", [18.0, 4_000.0])
def test_more_steps_than_are_composed_have_the_best_of_all_orders(sigma):
    """By Canonne, Kamath and Steinke 2020, proposition 12. The best is 64, or above 4096."""
    steps = 2 * pld.MOST_STEPS
    best = min(
        a / sigma**2 / 2 + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1)
        for a in [*range(2, 65), 128, 256, 512, 1024, 2048, 4096]
    )
    found = epsilon([(sigma * math.sqrt(steps), 1.0, steps)], 1e-5)
    assert found == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    "entry",
    [(0.05, 0.1, 10**6), pytest.param((0.001, 0.01, 1_000), marks=pytest.mark.slow),
     (1.0, 0.01, 10**9), (0.05, 1.0, 10**5),
     (1e4, 1e-3, 10**5), (1.0, 1e-5, 1_000), (1.0, 0.999, 1_000)],
)  # fmt: skip
def test_beyond_the_grid_it_is_bounded_too(entry):
    begin = time.process_time()
    assert 0 < epsilon([entry], 1e-5) < math.inf
    assert time.process_time() - begin < 5


def test_steps_of_several_kinds_are_composed():
    parts = [(1.0, 0.01, 1_000), (50.0, 0.001, 10_000), (0.8, 0.02, 100)]
    whole = epsilon(parts, 1e-5)
    assert max(epsilon([part], 1e-5) for part in parts) < whole
    assert whole < sum(epsilon([part], 1e-5 / 3) for part in parts)
    assert epsilon(parts[::-1], 1e-5) == pytest.approx(whole, rel=1e-9)
    halves = [(1.0, 0.01, 400), (2.0, 0.01, 3), (1.0, 0.01, 600)]
    assert epsilon(halves, 1e-5) == epsilon([(1.0, 0.01, 1_000), (2.0, 0.01, 3)], 1e-5)


def test_a_scheduler_s_many_sigmas_cost_at_most_what_the_smallest_would():
    sigmas = np.linspace(2, 1, 300)
    found = epsilon([(sigma, 0.01, 1) for sigma in sigmas], 1e-5)
    # As many steps with the same Σ 1/σ² cost about the same.
    alike = epsilon([(float(np.mean(sigmas**-2.0) ** -0.5), 0.01, 300)], 1e-5)
    assert 0.9 * alike < found < 1.2 * alike


def test_merged_entries_have_no_more_noise_and_no_fewer_samples():
    entries = [(1 + i / 100, 0.01 * (1 + i % 7), i + 1) for i in range(200)]
    few = merged(entries)
    assert len(few) <= pld.MOST_ENTRIES
    assert sum(n for _, _, n in few) == sum(n for _, _, n in entries)
    assert min(s for s, _, _ in few) == 1
    assert max(q for _, q, _ in few) == pytest.approx(0.07)
    for sigma, rate, steps in few:
        assert sum(n for s, q, n in entries if s >= sigma and q <= rate) >= steps
    assert merged(entries[:40]) == entries[:40]


def test_what_costs_nothing_or_everything():
    assert epsilon([], 1e-5) == 0
    assert epsilon([(1.0, 0.0, 10), (math.inf, 0.1, 3)], 1e-5) == 0
    for sigma in (0.0, -1.0, math.nan):
        assert epsilon([(1.0, 0.1, 3), (sigma, 0.1, 1)], 1e-5) == math.inf
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match="give a number above 0 and below 1"):
            epsilon([(1.0, 0.1, 3)], delta)
    numbers = [(np.float32(1), np.float64(0.01), np.int64(100))]
    assert epsilon(numbers, 1e-5) == epsilon([(1.0, 0.01, 100)], 1e-5)


def test_it_is_an_accountant_of_opacus():
    account = PLDAccountant()
    assert account.get_epsilon(1e-5) == 0
    for sigma in (1.0, 1.0, 2.0):
        account.step(noise_multiplier=sigma, sample_rate=0.1)
    assert account.history == [(1.0, 0.1, 2), (2.0, 0.1, 1)]
    assert len(account) == 3
    other = PLDAccountant()
    other.load_state_dict(account.state_dict())
    assert other.get_epsilon(1e-5) == account.get_epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="has the mechanism 'prv', and this accountant 'pld'"):
        other.load_state_dict(PRVAccountant().state_dict())
    with pytest.raises(ValueError, match="has the mechanism None"):
        other.load_state_dict({"history": []})
    assert other.history == account.history
    count = account.get_optimizer_hook_fn(0.1)  # as Opacus's
    count(SimpleNamespace(noise_multiplier=3.0, accumulated_iterations=2))
    assert account.history[-1] == (3.0, 0.2, 1)
    assert isinstance(PrivacyEngine().accountant, IAccountant)


@pytest.mark.parametrize("delta", [1e-40, 1e-15, 0.3, 0.9])
def test_a_curve_is_as_close_whatever_delta_is_stated(delta):
    history = [(1.0, 0.01, 100)]
    at = pld.curve(history, delta)
    for one in (1e-6, 1e-3):
        assert at(one) == pytest.approx(pld.epsilon(history, one), rel=0.01)
    assert at(min(delta, 1e-6)) == pytest.approx(pld.epsilon(history, min(delta, 1e-6)), rel=0.01)
