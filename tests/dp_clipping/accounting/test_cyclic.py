"""The account of cyclic batches, against jax_privacy and dp-accounting."""

import math

import pytest

from dp_clipping.accounting.cyclic import epsilon, squared_mu, uses

# with dp-accounting 0.6.0's PLDAccountant(NeighboringRelation.REPLACE_SPECIAL):
# .compose(SelfComposedDpEvent(GaussianDpEvent(sigma), uses)).get_epsilon(delta)
EPSILONS = [  # σ, b, steps, δ, ε
    (1.0, 10, 10, 1e-5, 4.377178),
    (2.0, 7, 21, 1e-5, 3.708635),
    (1.5, 7, 22, 1e-6, 6.802657),
    (0.8, 100, 250, 1e-7, 13.092821),
]


@pytest.mark.parametrize(("sigma", "batches", "steps", "delta", "expected"), EPSILONS)
def test_epsilon_is_that_of_the_reference(sigma, batches, steps, delta, expected):
    found = epsilon([[(sigma, 1 / batches, steps)]], delta)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_unit_is_used_once_in_each_epoch_begun():
    """jax_privacy 2.0.0: matrix_factorization.sensitivity.minsep_true_max_participations(n, 7);
    and fixed_epoch_sensitivity(np.eye(21), 3) ** 2 is 3."""
    for steps, expected in ((1, 1), (7, 1), (8, 2), (21, 3), (22, 4)):
        assert uses([(1.0, 1 / 7, steps)]) == expected
    assert squared_mu([(1.0, 1 / 7, 21)]) == 3


def test_noise_that_changes_counts_for_the_unit_that_has_the_least():
    """Four steps of σ 1, then of σ 2, in epochs of three: place 0 has 1, 1/4 and no more."""
    history = [(1.0, 1 / 3, 4), (2.0, 1 / 3, 3)]
    assert squared_mu(history) == 1 + 1 + 1 / 4
    assert squared_mu([(1.0, 1 / 3, 3), (2.0, 1 / 3, 3)]) == 1 + 1 / 4


def test_each_key_has_a_split_of_its_own():
    """A unit may be in the last batch under one key and in the first under the next."""
    one = [(1.0, 1 / 4, 1)]
    assert epsilon([one, one], 1e-5) == epsilon([[(1.0, 1 / 4, 5)]], 1e-5)
    assert epsilon([one, one], 1e-5) > epsilon([[(1.0, 1 / 4, 2)]], 1e-5)


def test_correlated_noise_counts_by_its_sensitivity():
    """Checks μ² of seven steps in epochs of three, at the least σ."""
    history = [(2.0, 1 / 3, 4), (4.0, 1 / 3, 3)]
    assert squared_mu(history, lambda steps, batches: steps + batches) == (10 / 2) ** 2
    spent = epsilon([history, history], 1e-5, lambda steps, batches: 0.6)
    assert spent == epsilon([[(2.0 / 0.6, 1.0, 2)]], 1e-5)


def test_nothing_was_released():
    assert epsilon([], 1e-5) == 0
    assert epsilon([[(1e9, 0.5, 1)]], 1e-5) == 0
    assert math.isfinite(epsilon([[(0.01, 0.5, 1000)]], 1e-5))
