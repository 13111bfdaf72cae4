"""The account of truncated Poisson batches is dp-accounting's, on a grid that is fine enough."""

import pytest
from dp_accounting import get_epsilon_gaussian

from dp_clipping.accounting.truncated_poisson import curve, epsilon

# with dp-accounting 0.6.0:
# event = TruncatedSubsampledGaussianDpEvent(units + 1, q, max_batch_size, sigma)
# PLDAccountant().compose(SelfComposedDpEvent(event, steps)).get_epsilon(1e-5)
EPSILONS = [  # σ, q, steps, units, max_batch_size, ε
    (2.0, 0.25, 60, 24, 8, 9.548839),
    (4.0, 0.1, 100, 1000, 110, 1.855858),
    (4.0, 0.1, 100, 1000, 140, 0.983257),
]


@pytest.mark.parametrize(("sigma", "rate", "steps", "units", "most", "expected"), EPSILONS)
def test_epsilon_is_that_of_the_reference(sigma, rate, steps, units, most, expected):
    found = epsilon([[(sigma, rate, steps)]], 1e-5, units=units, max_batch_size=most)
    assert expected * (1 - 1e-6) <= found <= 1.005 * expected


def test_the_worse_one_of_both_neighbours_counts():
    """Where almost all batches are truncated, fewer units are more often in one.

    dp-accounting 0.6.0, with units in place of units + 1: 1.252632 of 20, and 1.188747 of 21.
    """
    found = epsilon([[(4.0, 0.5, 10)]], 1e-5, units=20, max_batch_size=2)
    assert found == pytest.approx(1.252632, rel=2e-3)


@pytest.mark.parametrize(("delta", "least"), [(1e-11, 17.815), (1e-12, 18.6)])
def test_what_an_fft_gets_wrong_is_charged(delta, least):
    """30,000 steps of σ = 1, q = 0.01: δ of dp-accounting's own ε is up to 1.24 times too large.

    `least` is of the same distribution on a grid four times finer, composed after an exponential
    tilt, which keeps its tail far above what an FFT rounds.
    """
    found = epsilon([[(1.0, 0.01, 30_000)]], delta, units=50_000, max_batch_size=5_000)
    assert found >= least


@pytest.mark.parametrize("delta", [1e-8, 1e-14])
def test_each_step_with_all_units_is_known_exactly(delta):
    """Nothing is truncated here; below what an FFT gets wrong a swap in each step is charged."""
    found = epsilon([[(30.0, 1.0, 1000)]], delta=delta, units=50, max_batch_size=51)
    changes = 1 if delta > 1e-10 else 2
    exact = get_epsilon_gaussian(30 / 1000**0.5 / changes, delta)
    assert exact * (1 - 1e-9) <= found <= 1.001 * exact


def test_steps_of_all_keys_compose():
    options = {"units": 100, "max_batch_size": 12}
    one, other = [(4.0, 0.1, 20)], [(6.0, 0.1, 5)]
    both = epsilon([one, other], 1e-5, **options)
    assert both == pytest.approx(epsilon([[*one, *other]], 1e-5, **options), rel=1e-9)
    assert both > epsilon([one], 1e-5, **options) > epsilon([other], 1e-5, **options) > 0
    assert epsilon([], 1e-5, **options) == 0
    assert curve(histories=[], delta=1e-5, **options)(1e-3) == 0
