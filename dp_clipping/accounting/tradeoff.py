"""Bounds what an attacker can achieve, from a run's privacy curve ε(δ).

An attacker sees all that a run releases and decides whether one unit was in the data. For a false
positive rate α, the trade-off function f(α) is the least false negative rate that is possible. A
mechanism is (ε, δ)-private for both orders of all neighbours if and only if

    f(α) ≥ max(1 − δ − e^ε α, e^(−ε)(1 − δ − α))

(Wasserman and Zhou 2010, "A Statistical Framework for Differential Privacy", theorem 2.4; Dong,
Roth and Su 2019, "Gaussian Differential Privacy", proposition 2.4). So f is at least the largest of
these lines over all pairs (ε, δ) of the curve, whatever the mechanism is. The pairs are few, and
every bound here is on the safe side of what all pairs would give. `docs/proofs/attacks.md` has the
proofs.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

Curve = list[tuple[float, float]]
"""Pairs (δ, ε), δ ascending."""

PAIRS = 24
SMALLEST = 1e-6
"""The curve begins at this δ, or at the one that is stated."""

LARGEST = 16.0
"""The logit of the largest δ of a curve: 1 − 1e-7."""

MEANINGLESS = 500.0
"""Above this ε, whose power of e is near the largest double, μ is infinite, and no δ but the
smallest is looked at."""

ROWS = 2000
"""Values of ε in a table."""

CLOSER = 1.5
"""Pairs are closer together where ε is small, by this power."""


def curve_of(epsilon: Callable[[float], float], delta: float) -> Curve:
    """Returns ε at `delta` and at others, from small δ to one at which ε is 0.

    Args:
        epsilon: of δ; it falls as δ rises.
    """
    least = min(delta, SMALLEST)
    stated = epsilon(delta)
    if math.isinf(stated) or epsilon(least) == 0:
        return [(delta, stated)]
    begin = low = math.log(least)  # its logit, but for less than 1e-6
    high = LARGEST
    for _ in range(12):  # where ε becomes 0
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon(_from_logit(middle)) > 0 else (low, middle)
    places = [(i / (PAIRS - 1)) ** CLOSER for i in range(PAIRS)]
    deltas = {_from_logit(high - place * (high - begin)) for place in places[:-1]}
    decades = {least, *(10.0**-k for k in range(7))}  # as people ask for them
    decades = {at for at in decades if least <= at < _from_logit(high)}
    return [(at, epsilon(at)) for at in sorted({delta, *decades, *deltas})]


def tabulated(
    delta_of: Callable[[Sequence[float]], np.ndarray], largest: float, charge: float
) -> Callable[[float], float]:
    """Returns ε as a function of δ, from δ of many ε, to the next of which it is rounded up.

    dp-accounting needs as long for all of these as for ε of one δ.

    Args:
        delta_of: of ascending ε, as of dp-accounting's distributions.
        largest: ε of the smallest δ that is asked for.
        charge: what is added to each δ.
    """
    if largest > MEANINGLESS:
        return lambda _: largest
    epsilons = 1.001 * largest * np.linspace(0, 1, ROWS) ** 2
    deltas = np.maximum.accumulate(delta_of(epsilons)[::-1]) + charge  # ascending, ε descending

    def at(delta: float) -> float:
        fitting = int(np.searchsorted(deltas, delta, side="right"))
        return float(epsilons[ROWS - fitting]) if fitting else math.inf

    return at


def false_negative_rate(curve: Curve, rate: float) -> float:
    """Returns a lower bound of f at a false positive rate α."""
    lines = [
        max(1 - delta - _exp(epsilon) * rate, _exp(-epsilon) * (1 - delta - rate))
        for delta, epsilon in curve
    ]
    return max(0.0, *lines)


def true_positive_rate(curve: Curve, rate: float) -> float:
    """Returns an upper bound of the true positive rate of every attack with this α, 1 − f(α).

    It is exact where it is too small to be told from 0 in 1 − f(α).
    """
    lines = [
        min(delta + _exp(epsilon) * rate, _exp(-epsilon) * (delta + rate) - math.expm1(-epsilon))
        for delta, epsilon in curve
    ]
    return min(1.0, *lines)


def gaussian_mu(curve: Curve, delta: float) -> float:
    """Returns the smallest μ whose Gaussian mechanism covers the curve from this δ on.

    For every δ' from δ to 1, the run is (ε, δ')-private for the ε that N(μ, 1) and N(0, 1) have at
    δ'. For smaller δ' no μ but the trivial one holds in general: the loss of sampled steps has a
    tail, rare as it is, of steps without sampling.

    The trade-off function of N(0, 1) and N(μ, 1) is Φ(Φ⁻¹(1 − α) − μ), and convex. Between two
    kinks f is a line. So it is below f where it is below f at the kinks.
    """
    lines = [(at, epsilon) for at, epsilon in curve if at >= delta]
    if any(epsilon > MEANINGLESS for _, epsilon in lines):
        return math.inf
    normal, mu = NormalDist(), 0.0
    for rate in _kinks(lines):
        missed = false_negative_rate(curve, rate)
        if rate > missed * (1 + 1e-9):  # on the other side of the diagonal, which mirrors this one
            continue
        if not rate:  # below the smallest double
            return math.inf
        found = true_positive_rate(curve, rate)
        of_missed = normal.inv_cdf(found) if found < 0.5 else -normal.inv_cdf(missed)
        mu = max(mu, of_missed - normal.inv_cdf(rate))
    return mu


def _kinks(lines: Sequence[tuple[float, float]]) -> list[float]:
    """Returns α of all places in which two lines meet, or one meets its mirror image."""
    found = [(1 - delta) / (1 + _exp(epsilon)) for delta, epsilon in lines if epsilon]
    for i, (delta, epsilon) in enumerate(lines):
        for other, less in lines[i + 1 :]:
            if less < epsilon:
                found.append((other - delta) * _exp(-epsilon) / -math.expm1(less - epsilon))
    return found


def _exp(x: float) -> float:
    return math.exp(min(x, MEANINGLESS))


def _from_logit(x: float) -> float:
    return 1 / (1 + math.exp(-x))
