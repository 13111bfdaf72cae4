"""Lower bounds on ε from guesses about which canaries were in the data of one run.

m canaries are in the data or not, by independent fair coins. An auditor looks at the run, guesses
r of the coins and abstains from the others. If the run is (ε, δ)-differentially private for adding
or removing one unit, then by theorem 5.2 of T. Steinke, M. Nasr and M. Jagielski, Privacy auditing
with one (1) training run (2023, arXiv 2305.08846), for all v

    P[at least v guesses are right] ≤ P[W ≥ v] + 2mδ · max_i P[v > W ≥ v − i] / i,

where W is binomial with r trials of probability e^ε / (1 + e^ε), and i = 1, ..., v. So the right
side is a p-value of "the run is (ε, δ)-private". It rises with ε. The largest ε whose p-value is
below 1 − confidence is a lower bound with that confidence.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy  # which imports scipy.stats where it is first used: that takes a second

from dp_clipping.kinds import number

STEPS = 60  # of a bisection; below float64's resolution from 1024 down
CONFIDENCE = number("a number between 0 and 1, as 0.95", lambda x: 0 < x < 1)
LARGEST = 1024.0  # an ε; e^ε is infinite in float64 above 709


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Returns the largest probability of so many correct guesses that (ε, δ)-privacy allows.

    Args:
        canaries: m.
        guesses: r, at most m; how many are made must not depend on the coins.
        correct: v, of the guesses.
        epsilon: ε.
        delta: δ.

    Raises:
        ValueError: unless 0 ≤ correct ≤ guesses ≤ canaries, ε ≥ 0 and 0 ≤ δ ≤ 1.
    """
    _check(canaries, guesses, correct, delta)
    if not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}: give a number of at least 0")
    at_least = _tails(guesses, epsilon)[: correct + 1]
    beta = at_least[correct]
    if not delta or not correct:
        return min(1.0, float(beta))
    below = np.arange(correct, 0, -1)  # i of v − i = 0, ..., v − 1
    alpha = ((at_least[:correct] - beta) / below).max()
    return min(1.0, float(beta + 2 * canaries * delta * alpha))


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Returns the largest ε that the guesses refute with this confidence; 0 if they refute none.

    Arguments are those of `p_value`.

    Raises:
        ValueError: as `p_value`, and unless 0 < confidence < 1.
    """
    _check(canaries, guesses, correct, delta)
    CONFIDENCE.check("confidence", confidence)
    refuted, possible = 0.0, LARGEST

    def is_refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) <= 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    for _ in range(STEPS):
        middle = (refuted + possible) / 2
        refuted, possible = (middle, possible) if is_refuted(middle) else (refuted, middle)
    return refuted


def refutes_curve(
    canaries: int, guesses: int, correct: int, curve: Sequence[tuple[float, float]],
    confidence: float = 0.95,
) -> bool:  # fmt: skip
    """Returns whether the guesses refute, with this confidence, that all of these (ε, δ) hold.

    A mechanism that is (ε_j, δ_j)-private for all j gives an event of probability x at least the
    probability g(x) = max_j max(0, e^(−ε_j)·(x − δ_j), 1 − δ_j − e^(ε_j)·(1 − x)) on a neighbour.
    Let r_i and h_i be bounds of the parts of P[at least i guesses are right] that belong to guesses
    that are right, and wrong, divided by m. If v right guesses have probability τ, then

        r_v = τv/m,  h_v = τ(r − v)/m,
        h_i = max(h_{i+1}, g(r_{i+1})),  r_i = r_{i+1} + (h_i − h_{i+1})·i/(r − i),

    and r_0 + h_0 ≤ r/m. So τ = 1 − confidence is refuted where the last line does not hold.

    Source: S. Mahloujifar, L. Melis and K. Chaudhuri, Auditing f-differential privacy in one run
    (2024, arXiv 2410.22235). It refutes more than `p_value` does, which knows one point of a curve.

    Args:
        canaries, guesses, correct: m, r and v, as of `p_value`.
        curve: pairs (ε_j, δ_j) with ε_j ≥ 0.
    """
    _check(canaries, guesses, correct, max(delta for _, delta in curve))
    CONFIDENCE.check("confidence", confidence)
    pairs = [(math.exp(-epsilon), delta) for epsilon, delta in curve]

    def least(x: float) -> float:
        inside = max(shrink * (x - delta) for shrink, delta in pairs)
        outside = max(1 - delta - (1 - x) / shrink if shrink else 0.0 for shrink, delta in pairs)
        return max(0.0, inside, outside)

    right = (1 - confidence) * correct / canaries
    wrong = (1 - confidence) * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = least(right) - wrong
        if more <= 0:  # then neither changes any more
            break
        wrong += more
        right = min(1.0, right + more * i / (guesses - i))
    return right + wrong > guesses / canaries


def _tails(trials: int, epsilon: float) -> np.ndarray:
    """Returns P[W ≥ k] for k = 0, ..., trials: that at most trials − k guesses are wrong."""
    wrong = np.arange(trials, -1, -1)
    return scipy.stats.binom.cdf(wrong, trials, scipy.special.expit(-epsilon))


def _check(canaries: int, guesses: int, correct: int, delta: float) -> None:
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} correct of {guesses} guesses about {canaries} canaries: give correct <= "
            "guesses <= canaries"
        )
    if not 0 <= delta <= 1:
        raise ValueError(f"delta is {delta}: give a number from 0 to 1")
