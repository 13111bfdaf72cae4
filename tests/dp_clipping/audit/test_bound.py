"""Reference figures of jax_privacy 2.0.0, and guesses about coins of mechanisms that are known.

python -c "from jax_privacy import auditing as a; print(a._one_run_p_value(m, r, v, ε, δ),
    a._epsilon_one_run(0, m, r, v, 1 - confidence, δ),
    a._epsilon_one_run_fdp(0, m, r, v, 1 - confidence, δ))"
"""

import math
from collections import Counter

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import binom, norm

from dp_clipping.audit.bound import epsilon_lower_bound, p_value, refutes_curve


class TestPValue:
    @pytest.mark.parametrize(
        ("guesses", "epsilon", "delta", "expected"),
        [
            ((1000, 100, 90), 1.0, 0.0, 2.7358128007661584e-05),
            ((1000, 100, 90), 1.5, 1e-5, 0.018764588474672005),
            ((1000, 1000, 700), 0.5, 1e-4, 0.001866056571519932),
            ((5000, 312, 300), 2.5, 1e-3, 0.5328035310102397),
            ((20, 20, 20), 2.0, 1e-5, 0.0790777565608811),
            ((1000, 10, 5), 0.0, 1e-5, 0.6271484375),
        ],
    )
    def test_reference_figures(self, guesses, epsilon, delta, expected):
        assert p_value(*guesses, epsilon, delta) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("correct", [0, 1, 30, 50])
    def test_pure_privacy_is_a_binomial_tail(self, correct):
        expected = binom.sf(correct - 1, 50, 1 / (1 + math.exp(-0.7)))
        assert p_value(80, 50, correct, 0.7, 0.0) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("guesses", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
    def test_impossible_guesses_are_refused(self, guesses):
        with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
            p_value(*guesses, 1.0, 0.0)


class TestEpsilonLowerBound:
    @pytest.mark.parametrize(
        ("guesses", "delta", "confidence", "expected"),
        [
            ((1000, 100, 95), 1e-5, 0.95, 2.165175787875039),
            ((1000, 1000, 700), 1e-5, 0.95, 0.7317406384658978),
            ((1000, 1000, 1000), 0.0, 0.95, 5.809068337173034),
            ((5000, 312, 300), 1e-3, 0.99, 0.0),
            ((100, 100, 55), 1e-5, 0.95, 0.0),
        ],
    )
    def test_reference_figures(self, guesses, delta, confidence, expected):
        found = epsilon_lower_bound(*guesses, delta, confidence)
        assert found == pytest.approx(expected, abs=2e-6)

    def test_randomized_response_is_refuted_as_often_as_it_may_be(self):
        """Each coin is told truly with probability e^ε / (1 + e^ε): the bound's worst case."""
        epsilon, canaries, runs = 1.0, 200, 400
        draw = torch.Generator().manual_seed(0)
        told = torch.rand(runs, canaries, generator=draw) < 1 / (1 + math.exp(-epsilon))
        above = 0
        for correct, times in Counter(told.sum(1).tolist()).items():
            above += times * (epsilon_lower_bound(canaries, canaries, correct, 0.0) > epsilon)
        assert 5 <= above <= 0.05 * runs + 9  # two standard deviations


def gaussian_delta(mu: float, epsilon: float) -> float:
    """B. Balle and Y. Wang, Improving the Gaussian mechanism (2018), theorem 8; mu = 1/σ."""
    above, below = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
    return max(0.0, above - math.exp(epsilon) * below)


def gaussian_curve(mu: float) -> list[tuple[float, float]]:
    return [(mu * n / 20, gaussian_delta(mu, mu * n / 20)) for n in range(201)]


class TestRefutesCurve:
    @pytest.mark.parametrize(
        ("guesses", "delta", "confidence", "expected"),
        [
            ((1000, 250, 220), 1e-5, 0.95, 2.7272939026026863),
            ((5000, 312, 300), 1e-5, 0.99, 3.2959418017474715),
            ((5000, 1250, 1000), 1e-3, 0.95, 1.288502488787905),
            ((200, 200, 150), 1e-5, 0.95, 1.7348014279472157),
            ((1000, 62, 62), 1e-5, 0.9, 5.081193134965115),
        ],
    )
    def test_reference_figures_of_gaussian_curves(self, guesses, delta, confidence, expected):
        def mu_of(epsilon):
            return brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-3, 50)

        less, more = gaussian_curve(mu_of(0.998 * expected)), gaussian_curve(mu_of(expected))
        assert refutes_curve(*guesses, less, confidence)
        assert not refutes_curve(*guesses, more, confidence)

    def test_one_point_refutes_less(self):
        curve = gaussian_curve(1.0)
        assert refutes_curve(5000, 312, 305, curve)
        assert not refutes_curve(5000, 312, 305, [(4.38, gaussian_delta(1.0, 4.38))])

    def test_scores_of_the_mechanism_itself_do_not_refute_it(self):
        draw = torch.Generator().manual_seed(0)
        for _ in range(20):
            coins = torch.rand(1000, generator=draw) < 0.5
            scores = coins + torch.randn(1000, generator=draw)
            top = coins[scores.argsort(descending=True)[:62]]
            assert not refutes_curve(1000, 62, int(top.sum()), gaussian_curve(1.0))

    def test_an_infinite_epsilon_is_never_refuted(self):
        assert not refutes_curve(1000, 100, 100, [(math.inf, 1e-5)])
