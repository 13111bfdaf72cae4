"""The account of balls-in-bins batches with independent Gaussian noise.

Each unit chooses one of the b batches of an epoch, uniformly and independently of all others and of
other epochs (Chua et al. 2024, "Balls-and-Bins Sampling for DP-SGD"; Feldman and Shenfeld 2025,
"Privacy Amplification by Random Allocation"). Adding or removing a unit changes an epoch no more
than these two distributions on the noise of its steps differ, in units of C:

    P = 1/b Σ_j N(e_j, σ²I),   Q = N(0, σ²I),   dP/dQ = 1/b Σ_j Λ_j,   Λ_j = exp(x_j/σ² − 1/(2σ²)).

Under Q, the Λ_j are independent with mean 1. δ(ε) of (P, Q) is E (S − e^ε)⁺, that of (Q, P) is
E (1 − e^ε S)⁺, where S = dP/dQ: both are convex in S. So δ only grows if the mass of a Λ_j, or of a
sum of them, is split between two numbers with the same mean. Here it is split between neighbours of
a geometric grid, on which sums are then formed exactly: an upper bound, with an error of second
order in the grid (Doroshenko et al. 2022, "Connect the Dots", do this to the loss itself). Both
tails are moved outwards, to 0 and to infinity. dp-accounting composes epochs and returns ε.
`docs/proofs/balls_in_bins.md` has the proof.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np

from dp_clipping.accounting.history import History
from dp_clipping.accounting.mechanism import batches_per_epoch
from dp_clipping.accounting.pld import ROUNDING
from dp_clipping.accounting.tradeoff import SMALLEST as SMALLEST_DELTA
from dp_clipping.accounting.tradeoff import tabulated

RESOLUTION = 0.04
"""Ratio of neighbours in a grid, as a part of the relative standard deviation."""

COARSEST = 2.0
"""The largest standard deviation that a grid is made for."""

SMALLEST = 0.2
"""Below this σ amplification is not accounted for: ε is above 20 in any case."""

HARDLY = 1e-19
"""Mass of a tail that is moved to 0 or to infinity."""

REACH = 9.5
"""Standard deviations of noise that the grid covers; beyond them is less than 1e-20."""


@dataclass(frozen=True)
class Ratio:
    """The distribution under Q of a sum of likelihood ratios, or one that makes δ larger.

    Attributes:
        values: above 0, ascending.
        mass: of each value.
        zero: mass of 0.
        lost: the part of the mean that is at infinity, with no mass under Q.
        mean, variance: of the sum itself.
    """

    values: np.ndarray
    mass: np.ndarray
    zero: float
    lost: float
    mean: float
    variance: float

    @property
    def spacing(self) -> float:
        """Returns the log of the ratio of neighbours that a grid for this needs."""
        return _spacing_for(math.sqrt(self.variance) / self.mean)


def _spacing_for(deviation: float) -> float:
    """Returns the log of the ratio of neighbours, for this relative standard deviation."""
    return RESOLUTION * min(COARSEST, deviation)


def constant(value: float) -> Ratio:
    """Returns the distribution of a number: of steps that were not made yet, in which S is 1."""
    return Ratio(np.array([value]), np.ones(1), 0.0, 0.0, value, 0.0)


def of_one_step(sigma: float) -> Ratio:
    """Returns Λ on a grid: each interval's mass at its ends, with the interval's mean."""
    from scipy.special import ndtr  # a dependency of dp-accounting

    spacing = _spacing_for(1 / sigma)
    ends = REACH / sigma, REACH / sigma + 1 / sigma**2
    logs = spacing * np.arange(
        math.floor((-ends[0] - 0.5 / sigma**2) / spacing),
        math.ceil((ends[1] - 0.5 / sigma**2) / spacing) + 1,
    )
    values, x = np.exp(logs), sigma * logs + 0.5 / sigma

    def between(x: np.ndarray) -> np.ndarray:
        """Returns the mass of a standard normal below, between and above these numbers."""
        low, high = np.r_[-np.inf, x], np.r_[x, np.inf]
        return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))

    under_q, under_p = between(x), between(x - 1 / sigma)  # under P: the means times the masses
    inside = under_q[1:-1]
    upper = (under_p[1:-1] - values[:-1] * inside) / np.diff(values)
    upper = np.clip(upper, 0, inside)
    mass = np.r_[inside - upper, 0] + np.r_[0, upper]
    mass[0] += under_p[0] / values[0]
    mass[-1] += under_q[-1]
    return Ratio(
        values, mass, zero=max(0.0, under_q[0] - under_p[0] / values[0]),
        lost=max(0.0, under_p[-1] - values[-1] * under_q[-1]),
        mean=1.0, variance=math.expm1(sigma**-2.0),
    )  # fmt: skip


def on_grid(found: Ratio, spacing: float, scale: float = 1.0) -> tuple[int, Ratio]:
    """Returns a distribution on scale·exp(k·spacing), and the first k.

    Values are in any order. Each one's mass goes to its two neighbours; tails move outwards.
    """
    places = np.floor(np.log(found.values / scale) / spacing).astype(np.int64)
    first = int(places.min())
    size = int(places.max()) - first + 2
    values = scale * np.exp(spacing * np.arange(first, first + size))
    places -= first
    low, high = values[places], values[places + 1]
    upper = found.mass * np.clip((found.values - low) / (high - low), 0, 1)
    mass = np.bincount(places, found.mass - upper, size) + np.bincount(places + 1, upper, size)

    start = int(np.searchsorted(np.cumsum(mass), HARDLY, side="right"))
    stop = size - int(np.searchsorted(np.cumsum((mass * values)[::-1]), HARDLY * found.mean))
    below, above = slice(0, start), slice(stop, size)
    kept = mass[start:stop].copy()
    moved = float((mass[below] * values[below]).sum() / values[start])
    kept[0] += moved
    kept[-1] += mass[above].sum()
    return first + start, Ratio(
        values[start:stop], kept, found.zero + float(mass[below].sum()) - moved,
        found.lost + float((mass[above] * (values[above] - values[stop - 1])).sum()),
        found.mean, found.variance,
    )  # fmt: skip


def added(one: Ratio, other: Ratio) -> Ratio:
    """Returns the distribution of the sum of two independent ones."""
    values = np.r_[0.0, one.values][:, None] + np.r_[0.0, other.values]
    mass = np.outer(np.r_[one.zero, one.mass], np.r_[other.zero, other.mass])
    whole = Ratio(
        values.ravel()[1:], mass.ravel()[1:], one.zero * other.zero, one.lost + other.lost,
        one.mean + other.mean, one.variance + other.variance,
    )  # fmt: skip
    return on_grid(whole, whole.spacing)[1]


@lru_cache
def doubled(sigma: float, times: int) -> Ratio:
    """Returns the distribution of Σ Λ_j over 2 ** times steps."""
    if not times:
        return of_one_step(sigma)
    half = doubled(sigma, times - 1)
    return added(half, half)


def of_steps(sigma: float, steps: int) -> Ratio:
    """Returns the distribution of Σ Λ_j over so many steps."""
    powers = [times for times in range(steps.bit_length()) if steps >> times & 1]
    return reduce(added, [doubled(sigma, times) for times in powers])


@lru_cache(64)
def losses(sigma: float, batches: int, steps: int, spacing: float) -> Any:
    """Returns dp-accounting's privacy loss distribution of the first `steps` of `batches` steps."""
    from dp_accounting.pld import privacy_loss_distribution

    found = of_steps(sigma, steps)
    if steps < batches:
        found = added(found, constant(batches - steps))
    first, found = on_grid(found, spacing, batches)
    under_p = found.mass * found.values / batches
    return privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
        {first + k: p for k, p in enumerate(under_p.tolist())},
        found.lost / batches,
        spacing,
        rounded_probability_mass_function_add={
            -first - k: q for k, q in enumerate(found.mass.tolist())
        },
        infinity_mass_add=found.zero,
        symmetric=False,
    )


def epochs_of(history: History) -> Iterator[tuple[float, int, int]]:
    """Yields σ, b and the number of steps of each epoch of a key.

    An epoch whose σ changes has the smallest one in all of its steps: less noise costs no less.
    """
    batches = batches_per_epoch(history)
    sigma, taken = math.inf, 0
    for here, _, steps in history:
        while steps:
            more = min(steps, batches - taken)
            sigma, taken, steps = min(sigma, here), taken + more, steps - more
            if taken == batches:
                yield sigma, batches, taken
                sigma, taken = math.inf, 0
    if taken:
        yield sigma, batches, taken


def epsilon(histories: Sequence[History], delta: float) -> float:
    """Returns ε at δ of balls-in-bins steps, for adding or removing one unit."""
    epochs, charge = _epochs_and_charge(histories)
    if not epochs:
        return 0.0
    if _is_amplified(epochs) and delta > charge:
        return float(_composed(epochs, _spacing(epochs)).get_epsilon_for_delta(delta - charge))
    mu = math.sqrt(sum(count * sigma**-2.0 for (sigma, _, _), count in epochs))
    from dp_accounting import get_epsilon_gaussian  # takes a second

    return float(get_epsilon_gaussian(1 / mu, delta))  # as if each unit's batch were known


def curve(histories: Sequence[History], delta: float) -> Callable[[float], float]:
    """Returns ε as a function of δ, from this δ or `SMALLEST_DELTA` on."""
    epochs, charge = _epochs_and_charge(histories)
    least = min(delta, SMALLEST_DELTA)
    if not _is_amplified(epochs) or least <= charge:
        return partial(epsilon, histories)
    composed = _composed(epochs, _spacing(epochs))
    return tabulated(composed.get_delta_for_epsilon, epsilon(histories, least), charge)


Epochs = tuple[tuple[tuple[float, int, int], int], ...]


def _epochs_and_charge(histories: Sequence[History]) -> tuple[Epochs, float]:
    """Returns how often there are epochs of which σ, b and steps, and what FFTs may round of δ."""
    epochs = Counter(epoch for history in histories if history for epoch in epochs_of(history))
    return tuple(epochs.items()), epochs.total() * ROUNDING  # as in `pld`


def _is_amplified(epochs: Epochs) -> bool:
    return bool(epochs) and min(sigma for (sigma, _, _), _ in epochs) >= SMALLEST


def _spacing(epochs: Epochs) -> float:
    """Returns the interval of privacy losses of these epochs."""
    return _spacing_for(
        min(math.sqrt(math.expm1(sigma**-2.0) / batches) for (sigma, batches, _), _ in epochs)
    )


@lru_cache(4)
def _composed(epochs: Epochs, spacing: float) -> Any:
    """Returns dp-accounting's privacy loss distribution of all epochs."""
    whole = None
    for (sigma, batches, steps), count in epochs:
        one = losses(sigma, batches, steps, spacing).self_compose(count)
        whole = one if whole is None else whole.compose(one)
    return whole
