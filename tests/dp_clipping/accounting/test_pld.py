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
from dp_clipping.accounting.target_epsilon import noise_multiplier_for

# σ, q, steps, and ε at δ = 1e-5 by dp-accounting 0.6.0's optimistic and pessimistic estimates at an
# interval of 1e-4 (1e-3 below σ = 0.15): python -m tests.support.pld_references
REFERENCES = [
    (0.1, 0.001, 100, 156.766, 156.864), (0.1, 0.001, 1000, 340.254, 341.25),
    (0.1, 0.001, 10000, 1132.01, 1141.99), (0.1, 0.01, 100, 354.104, 354.196),
    (0.1, 0.01, 1000, 1194.8, 1195.74), (0.1, 0.1, 100, 1200.52, 1200.58),
    (0.5, 0.001, 100, 2.10441, 2.10865), (0.5, 0.001, 1000, 3.19662, 3.23888),
    (0.5, 0.001, 10000, 4.80433, 5.22683), (0.5, 0.001, 100000, 8.80454, 13.0288),
    (0.5, 0.01, 100, 6.47117, 6.47621), (0.5, 0.01, 1000, 13.3104, 13.3608),
    (0.5, 0.01, 10000, 42.862, 43.3665), (0.5, 0.1, 100, 31.366, 31.371),
    (0.5, 0.1, 1000, 126.117, 126.167), (1, 0.001, 100, 0.0501629, 0.0551747),
    (1, 0.001, 1000, 0.0988537, 0.148956), (1, 0.001, 10000, 0, 0.475987),
    (1, 0.001, 100000, 0, 1.63803), (1, 0.01, 100, 0.713036, 0.718037),
    (1, 0.01, 1000, 1.77824, 1.82824), (1, 0.01, 10000, 5.68772, 6.18774),
    (1, 0.01, 100000, 20.5731, 25.5733), (1, 0.1, 100, 7.0416, 7.0466),
    (1, 0.1, 1000, 25.1546, 25.2046), (1, 0.1, 10000, 127.379, 127.879),
    (2, 0.001, 100, 0.00964903, 0.0146685), (2, 0.001, 1000, 6.18029e-05, 0.050137),
    (2, 0.001, 10000, 0, 0.173847), (2, 0.001, 100000, 0, 0.605685),
    (2, 0.01, 100, 0.184797, 0.189799), (2, 0.01, 1000, 0.572039, 0.622049),
    (2, 0.01, 10000, 1.66273, 2.16277), (2, 0.01, 100000, 3.13242, 8.1326),
    (2, 0.1, 100, 2.3324, 2.3374), (2, 0.1, 1000, 8.22929, 8.27929),
    (2, 0.1, 10000, 35.5037, 36.0037), (2, 0.1, 100000, 204.238, 209.238),
    (5, 0.001, 100, 0, 0.00465493), (5, 0.001, 1000, 0, 0.0170159), (5, 0.001, 10000, 0, 0.060792),
    (5, 0.001, 100000, 0, 0.213916), (5, 0.01, 100, 0.0562492, 0.0612556),
    (5, 0.01, 1000, 0.161436, 0.21146), (5, 0.01, 10000, 0.236312, 0.736397),
    (5, 0.01, 100000, 0, 2.6275), (5, 0.1, 100, 0.753286, 0.758287),
    (5, 0.1, 1000, 2.60068, 2.65068), (5, 0.1, 10000, 9.64293, 10.1429),
    (5, 0.1, 100000, 41.8358, 46.836), (10, 0.001, 100, 0, 0.002152),
    (10, 0.001, 1000, 0, 0.00816668), (10, 0.001, 10000, 0, 0.0297636),
    (10, 0.001, 100000, 0, 0.105813), (10, 0.01, 100, 0.0227209, 0.0277333),
    (10, 0.01, 1000, 0.0477967, 0.097841), (10, 0.01, 10000, 0, 0.34251),
    (10, 0.01, 100000, 0, 1.20447), (10, 0.1, 100, 0.342114, 0.347115),
    (10, 0.1, 1000, 1.15895, 1.20896), (10, 0.1, 10000, 3.89637, 4.3964),
    (10, 0.1, 100000, 12.9174, 17.9175), (20, 0.001, 100, 0, 0.00114425),
    (20, 0.001, 1000, 0, 0.00449177), (20, 0.001, 10000, 0, 0.0166827),
    (20, 0.001, 100000, 0, 0.0599467), (20, 0.01, 100, 0.0076335, 0.0126569),
    (20, 0.01, 1000, 0, 0.0455509), (20, 0.01, 10000, 0, 0.160867), (20, 0.01, 100000, 0, 0.563863),
    (20, 0.1, 100, 0.156389, 0.161392), (20, 0.1, 1000, 0.513122, 0.563132),
    (20, 0.1, 10000, 1.49613, 1.99617), (20, 0.1, 100000, 2.51851, 7.5187),
    (50, 0.001, 100, 0, 0.000628852), (50, 0.001, 1000, 0, 0.00256191),
    (50, 0.001, 10000, 0, 0.00970372), (50, 0.001, 100000, 0, 0.0352889),
    (50, 0.01, 100, 0, 0.00450076), (50, 0.01, 1000, 0, 0.0167005), (50, 0.01, 10000, 0, 0.0599893),
    (50, 0.01, 100000, 0, 0.211501), (50, 0.1, 100, 0.0538142, 0.058821),
    (50, 0.1, 1000, 0.157054, 0.207078), (50, 0.1, 10000, 0.225916, 0.726003),
    (50, 0.1, 100000, 0, 2.59555),
]  # fmt: skip

GRID = [
    (sigma, rate, steps)
    for sigma in (0.05, 0.1, 0.15, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    for rate in (0.001, 0.01, 0.1)
    for steps in (100, 1_000, 10_000, 100_000)
]


FEW = [entry for entry in GRID if entry[0] in (0.05, 0.5, 20.0) and entry[2] in (100, 100_000)]


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_it_is_between_the_estimates_of_dp_accounting(part):
    for sigma, rate, steps, low, high in REFERENCES[part::4]:
        assert low <= epsilon([(sigma, rate, steps)], 1e-5) <= 1.01 * high, (sigma, rate, steps)


@pytest.mark.parametrize("grid", [FEW, pytest.param(GRID, marks=pytest.mark.slow)])
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


def test_a_small_epsilon_has_a_quarter_of_the_tolerance():
    exact = get_epsilon_gaussian(50, 1e-5)
    assert exact <= epsilon([(50 * math.sqrt(1_000), 1.0, 1_000)], 1e-5) <= 1.0015 * exact


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


def test_small_deltas_have_larger_epsilons():
    found = [epsilon([(1.0, 0.01, 1_000)], 10.0**-k) for k in range(1, 20, 3)]
    assert found == sorted(found)
    assert epsilon([(1e6, 0.01, 1_000)], 1e-5) == 0


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


@pytest.mark.parametrize(
    ("target", "rate", "steps"),
    [(8.0, 0.01, 1_000), (3.0, 0.001, 100_000), (1_000.0, 0.01, 1_000),
     pytest.param(50.0, 0.1, 100_000, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_target_is_reached_in_seconds(target, rate, steps):
    begin = time.process_time()
    found = noise_multiplier_for(
        target_epsilon=target, target_delta=1e-5, sample_rate=rate, steps=steps, accountant="pld"
    )
    assert time.process_time() - begin < 12
    assert 0.999 * target - 0.01 <= epsilon([(found, rate, steps)], 1e-5) <= target
