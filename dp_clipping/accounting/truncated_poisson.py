"""The account of truncated Poisson batches with independent Gaussian noise, by dp-accounting.

Each unit is sampled with probability q, independently, and of more than `max_batch_size` sampled
ones a uniformly random subset of that size is kept. Without truncation, a unit more or less changes
a sum by C at most; with it, another unit may take its place, and the sum changes by 2C. The cost of
that is in the privacy loss distribution, weighted by its probability, which is why the number of
units counts (Chua et al. 2024, "Scalable DP-SGD: Shuffling vs. Poisson Subsampling";
"Tighter Privacy Analysis for Truncated Poisson Sampling", arXiv 2508.15089; proof in
`docs/proofs/truncated_poisson.md`).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from dp_clipping.accounting.history import History, count
from dp_clipping.accounting.pld import ROUNDING
from dp_clipping.accounting.tradeoff import SMALLEST, tabulated

WIDEST, NARROWEST, PART = 1e-3, 1e-6, 0.15
"""The interval of privacy losses, as a part of a step's standard deviation, and its bounds. Losses
are rounded to it so that ε only grows."""


def epsilon(
    histories: Sequence[History], delta: float, *, units: int, max_batch_size: int
) -> float:
    """Returns ε at δ of truncated Poisson steps, for adding or removing one unit.

    Args:
        units: in the data. A neighbour has one more or one less, and ε is the larger one of both:
            more units are truncated more often, and fewer are sampled more often.
        max_batch_size: the most units of a batch.
    """
    entries = [entry for history in histories for entry in history]
    return max(_epsilon(entries, delta, larger, max_batch_size) for larger in _larger_ones(units))


def curve(
    histories: Sequence[History], delta: float, *, units: int, max_batch_size: int
) -> Callable[[float], float]:
    """Returns ε as a function of δ, from this δ or `SMALLEST` on."""
    entries = [entry for history in histories for entry in history]
    charge, least = count(entries) * ROUNDING, min(delta, SMALLEST)
    if not entries or least <= charge:
        return lambda delta: epsilon(histories, delta, units=units, max_batch_size=max_batch_size)
    both = []
    for larger in _larger_ones(units):
        accountant = _composed(tuple(map(tuple, entries)), larger, max_batch_size)
        largest = float(accountant.get_epsilon(least - charge))
        both.append(tabulated(accountant.get_delta, largest, charge))
    return lambda delta: max(at(delta) for at in both)


def _larger_ones(units: int) -> tuple[int, int]:
    """Returns the units of the larger one of the data and a neighbour with one less, or more."""
    return units, units + 1


def _epsilon(entries: History, delta: float, units: int, max_batch_size: int) -> float:
    """Returns ε for two data sets of which the larger one has so many units."""
    if not entries:
        return 0.0
    left = delta - count(entries) * ROUNDING
    if left > 0:
        return float(_composed(tuple(map(tuple, entries)), units, max_batch_size).get_epsilon(left))
    import dp_accounting as dp  # takes a second

    # Less than an FFT may get wrong: each step moves a sum by 2C at most, whoever was sampled.
    mu = 2 * math.sqrt(sum(steps * sigma**-2.0 for sigma, _, steps in entries))
    return float(dp.get_epsilon_gaussian(1 / mu, delta))


@lru_cache(4)
def _composed(
    entries: tuple[tuple[float, float, int], ...], units: int, max_batch_size: int
) -> Any:
    """Returns dp-accounting's accountant of all steps, which many δ are asked of."""
    import dp_accounting as dp  # takes a second

    spread = min(rate * math.expm1(min(100.0, sigma**-2.0)) ** 0.5 for sigma, rate, _ in entries)
    interval = max(NARROWEST, min(WIDEST, PART * spread))
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    for sigma, rate, steps in entries:
        event = dp.TruncatedSubsampledGaussianDpEvent(units, rate, max_batch_size, sigma)
        accountant.compose(dp.SelfComposedDpEvent(event, steps))
    return accountant
