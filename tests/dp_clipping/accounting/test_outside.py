"""Each account beside dp-accounting's own accountants, computed here on a grid.

`test_pld.py` has more of δ = 1e-5, and `test_balls_in_bins.py` what jax_privacy says of an epoch,
of which dp-accounting has no event.
"""

import dp_accounting as dp
import pytest
from dp_accounting import rdp

from dp_clipping.accounting import balls_in_bins, cyclic, pld, truncated_poisson

POINTS = [  # σ, q, steps, δ
    (0.7, 0.05, 200, 1e-3), (1.0, 0.01, 1000, 1e-9), (1.5, 0.2, 50, 1e-7), (4.0, 0.5, 1000, 1e-5),
    (0.5, 0.25, 4, 1e-6), (2.0, 1.0, 30, 1e-6),
]  # fmt: skip
ORDERS = [*range(2, 64), 128, 256]


def poisson(sigma: float, rate: float, steps: int) -> dp.DpEvent:
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), steps)


def of_dp_accounting(event: dp.DpEvent, delta: float, interval: float = 1e-3) -> float:
    """Returns ε, at most an interval a step, and what its FFTs round, above the truth."""
    accountant = dp.pld.PLDAccountant(value_discretization_interval=interval)
    return accountant.compose(event).get_epsilon(delta)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), POINTS)
def test_poisson_batches(sigma, rate, steps, delta):
    """Close to its loss distributions, and never above its Rényi divergences."""
    found = pld.epsilon([(sigma, rate, steps)], delta)
    assert found == pytest.approx(of_dp_accounting(poisson(sigma, rate, steps), delta), rel=0.01)
    accountant = rdp.RdpAccountant(ORDERS).compose(poisson(sigma, rate, steps))
    assert found <= accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [*POINTS[3:5], *(pytest.param(*point, marks=pytest.mark.slow) for point in POINTS[:3])],
)
@pytest.mark.parametrize("part", [1.3, 100])
def test_truncated_batches(sigma, rate, steps, delta, part):
    """A cap that no batch reaches has the account of Poisson batches."""
    most = min(101, int(100 * rate * part))
    found = truncated_poisson.epsilon(
        [[(sigma, rate, steps)]], delta, units=100, max_batch_size=most
    )
    event = poisson(sigma, rate, steps)
    if most < 101:
        event = dp.TruncatedSubsampledGaussianDpEvent(101, rate, most, sigma)
        event = dp.SelfComposedDpEvent(event, steps)
    assert found == pytest.approx(of_dp_accounting(event, delta), rel=0.01)


@pytest.mark.parametrize(("sigma", "batches", "steps", "delta"),
                         [(1.0, 4, 10, 1e-5), (3.0, 10, 100, 1e-7), (0.6, 2, 7, 1e-3)])  # fmt: skip
def test_batches_in_turn(sigma, batches, steps, delta):
    """A unit is in every `batches`-th step: so many Gaussian mechanisms, of which it knows."""
    uses = -(-steps // batches)
    event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(sigma), uses)
    expected = of_dp_accounting(event, delta)
    history = [(sigma, 1 / batches, steps)]
    assert cyclic.epsilon([history], delta) == pytest.approx(expected, rel=0.005)
    known = balls_in_bins.epsilon([history], delta)  # less: who is in a batch is not known
    assert known <= expected * 1.005
    first = balls_in_bins.epsilon([[(sigma, 1 / batches, 1)]], delta)
    assert first == pytest.approx(of_dp_accounting(poisson(sigma, 1 / batches, 1), delta), rel=0.01)
