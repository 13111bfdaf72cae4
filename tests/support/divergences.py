"""Lower bounds of the divergence of two mechanisms' outputs, from samples of both.

The hockey-stick divergence at ε, max over sets S of P(S) − e^ε Q(S), is the least δ with which the
mechanism is (ε, δ) private for the two data sets; that of Rényi is what its Rényi account claims. A
tester learns the set S, or the function g of the variational form of Rényi's divergence, on half of
the samples, and bounds the expectations on the other half. What it says is right in at least a
share `confidence` of tests, whatever it has learned. Both learn log P/Q by logistic regression.

Sources: W. Kong et al., DP-Auditorium: a large scale library for auditing differential privacy
(2023, arXiv 2307.05608); for Rényi's variational form J. Birrell et al., Variational
representations and neural network estimation of Rényi divergences (2021), theorem 3.1; for bounds
of a mean A. Maurer and M. Pontil, Empirical Bernstein bounds (2009), theorem 4.
"""

import math

import numpy as np
from scipy.optimize import minimize

from tests.support.audit import clopper_pearson

CUTS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Learned log ratios are cut off at one of these: a mean of bounded numbers can be bounded."""


def log_ratio_of(p: np.ndarray, q: np.ndarray):
    """Returns a function that was learned to be log P/Q, of samples [n]: a polynomial."""
    both = np.concatenate([p, q])
    center, scale = both.mean(), both.std() or 1.0

    def features(x: np.ndarray) -> np.ndarray:
        z = np.clip((x - center) / scale, -8, 8)
        return np.stack([np.ones_like(z), z, z**2, z**3])

    a, b = features(p), features(q)

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        on_p, on_q = w @ a, w @ b
        value = np.logaddexp(0, -on_p).mean() + np.logaddexp(0, on_q).mean()
        wrong_p, wrong_q = 1 / (1 + np.exp(on_p)), 1 / (1 + np.exp(-on_q))
        slope = -(a * wrong_p).mean(1) + (b * wrong_q).mean(1)
        return float(value + 1e-4 * w @ w), slope + 2e-4 * w

    weights = minimize(loss, np.zeros(4), jac=True, method="L-BFGS-B").x
    return lambda x: weights @ features(x)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float, confidence: float) -> float:
    """Returns a lower bound of max over S of P(S) − e^ε Q(S), of samples [n] of each."""
    half = len(p) // 2
    ratio = log_ratio_of(p[:half], q[:half])
    cuts = np.quantile(ratio(np.concatenate([p[:half], q[:half]])), np.linspace(0, 1, 101))
    first_p, first_q = (ratio(x[:half])[:, None] > cuts for x in (p, q))
    cut = cuts[np.argmax(first_p.mean(0) - math.exp(epsilon) * first_q.mean(0))]
    in_p, in_q = (ratio(x[half:]) > cut for x in (p, q))
    each = (1 + confidence) / 2
    least_p = 1 - clopper_pearson(np.array((~in_p).sum()), len(in_p), each)
    most_q = clopper_pearson(np.array(in_q.sum()), len(in_q), each)
    return float(least_p - math.exp(epsilon) * most_q)


def renyi(p: np.ndarray, q: np.ndarray, alpha: float, confidence: float) -> float:
    """Returns a lower bound of D_α(P‖Q), α > 1, of samples [n] of each.

    It is the supremum over g of α/(α − 1) log E_P e^((α−1)g) − log E_Q e^(αg).
    """
    half = len(p) // 2
    ratio = log_ratio_of(p[:half], q[:half])
    bounds = [
        [_of_cut(ratio(p[part]), ratio(q[part]), alpha, cut, confidence) for cut in CUTS]
        for part in (slice(half), slice(half, None))
    ]
    return bounds[1][int(np.argmax(bounds[0]))]


def _of_cut(
    on_p: np.ndarray, on_q: np.ndarray, alpha: float, cut: float, confidence: float
) -> float:
    on_p, on_q = (np.clip(on, -cut, cut) - cut for on in (on_p, on_q))
    failing = (1 - confidence) / 2
    least_p = mean_bound(np.exp((alpha - 1) * on_p), failing, -1)
    most_q = mean_bound(np.exp(alpha * on_q), failing, 1)
    # e^−cut was taken out of both, (α − 1) and α times, and so α times of each logarithm.
    return alpha / (alpha - 1) * math.log(least_p) - math.log(most_q) if least_p > 0 else 0.0


def mean_bound(x: np.ndarray, failing: float, sign: int) -> float:
    """Returns a bound of the mean of numbers from 0 to 1; it fails with probability `failing`."""
    logarithm = math.log(2 / failing)
    spread = math.sqrt(2 * x.var(ddof=1) * logarithm / len(x)) + 7 * logarithm / 3 / (len(x) - 1)
    return float(x.mean() + sign * spread)
