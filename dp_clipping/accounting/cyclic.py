"""The account of cyclic batches with Gaussian noise: no amplification, few uses.

A unit is in the same one of the b batches of each epoch. So t steps use it at most ⌈t/b⌉ times, b
steps apart. Its gradient has norm at most C in each of those steps and does not occur in the
others. For data sets that differ in that unit being empty, all steps together are therefore a
Gaussian mechanism with μ² = Σ 1/σ² over the steps that use it (Dong, Roth and Su 2019, "Gaussian
Differential Privacy": composition of adaptive Gaussian mechanisms). ε at δ is that of Balle and
Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy", Theorem 8.

The split of the data into batches may be known to everybody. It must not depend on the unit that
is replaced, so the number of units is public: under "add or remove one unit" the others would move.

With correlated noise (`noise.correlated`) μ is the largest norm by which one unit moves the clipped
sums in the coordinates in which the noise is independent, over σ. A later key begins anew: what its
steps have of its noise before them is independent of all else and only adds to theirs.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dp_clipping.accounting.history import History
from dp_clipping.accounting.mechanism import batches_per_epoch

Sensitivity = Callable[[int, int], float]
"""(steps, batches of an epoch) -> the largest norm by which one unit moves them, in units of C."""


def uses(history: History) -> int:
    """Returns how many of a key's steps use a unit at most, ⌈t/b⌉."""
    steps = sum(steps for _, _, steps in history)
    return -(-steps // batches_per_epoch(history))


def squared_mu(history: History, sensitivity: Sensitivity | None = None) -> float:
    """Returns the largest Σ 1/σ² over the steps of a key that use one unit, or (sensitivity/σ)²."""
    if sensitivity is not None:
        steps = sum(steps for _, _, steps in history)
        least = min(sigma for sigma, _, _ in history)  # all are the same, but for a user's own
        return (sensitivity(steps, batches_per_epoch(history)) / least) ** 2
    each: np.ndarray = np.repeat(
        [sigma**-2.0 for sigma, _, _ in history], [steps for _, _, steps in history]
    )
    batches = batches_per_epoch(history)
    padded = np.zeros(uses(history) * batches)
    padded[: len(each)] = each
    return float(padded.reshape(-1, batches).sum(0).max(initial=0.0))


def epsilon(
    histories: Sequence[History], delta: float, sensitivity: Sensitivity | None = None
) -> float:
    """Returns ε at δ of cyclic steps, for data sets in which one unit is empty or not.

    Each key has its own split of the data, so the worst places in the splits add up.

    Args:
        sensitivity: of correlated noise; default: the noise of each step is independent.
    """
    found = sum(squared_mu(history, sensitivity) for history in histories if history)
    if not found:
        return 0.0
    from dp_accounting import get_epsilon_gaussian  # takes a second

    return float(get_epsilon_gaussian(found**-0.5, delta))
