"""The curve ε(δ) that an account states: what one run must satisfy at all δ together."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from dp_clipping.accounting.history import History
from dp_clipping.torch_compat import loss_distribution

Curve = Sequence[tuple[float, float]]
"""Pairs (ε, δ) that an account states, ε ≥ 0."""

DELTAS = (
    0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.27, 0.24, 0.21, 0.18, 0.16, 0.14, 0.12, 0.1,
    0.085, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.014, 0.01, 0.007, 0.005, 0.003, 0.002, 1e-3, 5e-4,
    1e-4, 1e-5, 1e-6,
)  # fmt: skip
ERROR = 0.01  # of an ε, as Opacus's accountant has it by default


def curve_of(accountant: Any, history: History) -> Curve:
    """Returns what an accountant states for a history.

    A δ at which it has no ε is left out. What it states is an upper bound, and a negative one is
    raised to 0: that is so in both directions, with a sample more and with one less.
    """
    account, pairs = deepcopy(accountant), []
    account.history = list(history)
    epsilon: Callable[[float], float] = account.get_epsilon
    deltas: Sequence[float] = DELTAS if account.mechanism() == "pld" else DELTAS[::3]
    error = DELTAS[-1] / 1000
    distribution = loss_distribution(account, epsilon_error=ERROR, delta_error=error)
    if distribution is not None:  # prv makes it anew for each δ, which takes long
        deltas = DELTAS

        def epsilon(delta: float) -> float:
            return distribution.compute_epsilon(delta, error, ERROR)[2]

    for delta in deltas:
        try:
            pairs.append((max(0.0, float(epsilon(delta))), delta))
        except (ValueError, RuntimeError):
            continue
    return pairs
