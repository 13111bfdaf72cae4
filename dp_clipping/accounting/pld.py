"""The default accountant: ε by privacy loss distributions, for any σ within about a second.

dp-accounting describes the privacy loss L of one step. Its distribution is rounded to multiples of
an interval so that δ only grows ("Connect the Dots", Doroshenko et al. 2022, arXiv 2207.04380), and
steps are composed by FFT. Two choices are made here.

**The interval h** decides how much ε grows and how long that takes. A loss between two multiples of
h is split between them with the same mass under both data sets. That multiplies its E e^{αL} by at
most 1 + α(α+1)h²/8. So T steps cost at most T(α+1)h²/8 more where −log δ has the slope α, and h is
where this is `TOLERANCE` of ε. ε and α are first those of Rényi differential privacy, and then
those that were found.

**Tilting.** An FFT in double precision is off by about 10⁻¹⁶ of the largest mass per step, at
100,000 steps by about 10⁻¹¹. At a δ of 10⁻¹² dp-accounting's own composition of so many Gaussian
steps (σ 300, q 1) is 3 % below the truth. So masses are multiplied by e^{θL} before it and divided
by it afterwards, with θ for which the composed L is around ε: δ is then as exact as the largest
mass.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from opacus.accountants import IAccountant
from scipy.fft import irfft, next_fast_len, rfft  # a dependency of dp-accounting

from dp_clipping.accounting.history import History, joined, totals_of

TOLERANCE = 0.003
"""Rounding adds at most about this part of ε."""

ROUNDS = 5
"""How often interval and θ are chosen anew."""

ENOUGH = 0.8
"""An interval that should shrink by no more than this factor is kept."""

COARSE = 1024
"""Losses of a step on the first grid, from which ε is estimated."""

LARGEST_STEP, LARGEST_SUM = 1 << 17, 1 << 20
"""Losses on the grids of one step and of all steps; where more are needed, ε is larger instead."""

MOST_ENTRIES = 40
"""Pairs of σ and q that are composed. Of more, neighbours count as the one with least noise."""

TILTS = np.geomspace(1e-6, 1e7, 131)
"""θ, Rényi orders minus one, at which moments are computed."""

SHARES = np.r_[np.geomspace(1e-4, 0.9, 24), np.geomspace(1, 1e3, 24)]
"""Steps away from θ, as a part of it, at which tails are bounded."""

HARDLY = 50.0
"""Minus log of the mass beyond a grid."""


class PLDAccountant(IAccountant):  # type: ignore[misc]  # Opacus has no types
    """Keeps a history as Opacus's accountants do, and computes ε by `epsilon`."""

    history: History

    def __init__(self) -> None:
        super().__init__()

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Counts a step."""
        self.history = joined(self.history, [(noise_multiplier, sample_rate, 1)])

    def get_epsilon(self, delta: float, *_: Any, **__: Any) -> float:
        """Returns ε at δ of all steps so far, which is not below the true one."""
        return epsilon(self.history, delta)

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        return "pld"


def epsilon(history: History, delta: float) -> float:
    """Returns ε at δ of Gaussian noise on Poisson batches, for adding or removing one unit.

    An upper bound. Infinite if a step had no noise, and 0 of no steps.

    Raises:
        ValueError: unless 0 < δ < 1, and for a sample rate above 1.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}: give a number above 0 and below 1")
    if any(not sigma > 0 for sigma, _, _ in history):
        return math.inf
    entries = merged([
        (float(sigma), float(rate), int(steps))
        for (sigma, rate), steps in totals_of(history).items()
        if rate and steps and sigma < math.inf
    ])  # fmt: skip
    if not entries:
        return 0.0
    removed = Composed(entries, delta, "REMOVE").epsilon()
    if removed == 0 or all(rate == 1 for _, rate, _ in entries):  # where adding a unit is alike
        return removed
    added = Composed(entries, delta, "ADD")
    return removed if added.is_below(removed) else max(removed, added.epsilon())


def merged(entries: History) -> History:
    """Returns entries that cost no less, at most `MOST_ENTRIES` of them.

    A noisier or less often sampled step is a random function of the other one. So steps of similar
    σ and q cost at most what they would with the least σ and the largest q among them.
    """
    cells = {entry[:2]: [entry] for entry in entries}
    width = 1e-3
    while len(cells) > MOST_ENTRIES:
        cells = {}
        for sigma, rate, steps in entries:
            cell = math.floor(math.log(sigma) / width), math.floor(math.log(rate) / width)
            cells.setdefault(cell, []).append((sigma, rate, steps))
        width *= 1.5
    return [
        (min(s for s, _, _ in cell), max(q for _, q, _ in cell), sum(n for _, _, n in cell))
        for cell in cells.values()
    ]


@dataclass(frozen=True)
class Losses:
    """The rounded privacy loss of a step.

    Attributes:
        interval: losses are multiples of it.
        first: the smallest multiple.
        log_mass: logarithms of the mass of this multiple and those that follow.
        infinite: mass of an infinite loss.
        steps: how many equal steps there are.
    """

    interval: float
    first: int
    log_mass: np.ndarray
    infinite: float
    steps: int

    def tilted(self, tilt: float) -> np.ndarray:
        """Returns log of each mass times e^{tilt·L}."""
        losses = self.interval * (self.first + np.arange(len(self.log_mass)))
        return self.log_mass + tilt * losses


class Composed:
    """All steps of a history in one direction, of adding or of removing a unit."""

    def __init__(self, entries: History, delta: float, direction: str) -> None:
        self.delta = delta
        self.steps = sum(steps for _, _, steps in entries)
        cut = max(-600.0, min(-50.0, math.log(delta / self.steps) - 25))
        self._known = [(*_known(sigma, rate, direction, cut), n) for sigma, rate, n in entries]
        self._widest = max(upper - lower for _, lower, upper, _ in self._known)
        self._coarse = self._rounded(self._widest / COARSE)
        self._moments = np.array([_moment(self._coarse, tilt) for tilt in TILTS])

    def _rounded(self, interval: float) -> list[Losses]:
        return [_rounded(*known, interval) for known in self._known]

    def is_below(self, epsilon: float) -> bool:
        """Returns whether ε at δ is below this one, if Chernoff's bound is enough to tell."""
        return bool((self._moments - TILTS * epsilon).min() < math.log(self.delta))

    def epsilon(self) -> float:
        """Returns ε at δ, the smallest of several bounds."""
        each = (self._moments - math.log(self.delta)) / TILTS  # of Rényi differential privacy
        best = int(each.argmin())
        found, slope = float(each[best]), float(TILTS[best])
        losses, is_enough = self._coarse, False
        for _ in range(ROUNDS):
            tilt = float(TILTS[(self._moments - TILTS * found).argmin()])
            window = self._window(tilt)
            wanted = max(
                math.sqrt(8 * TOLERANCE * found / (self.steps * (slope + 1))),
                self._widest / LARGEST_STEP,
                (window.highest - window.lowest) / LARGEST_SUM,
            )
            if not ENOUGH <= wanted / losses[0].interval <= 1 / ENOUGH:
                losses = self._rounded(wanted)
            elif is_enough:
                break
            now, slope = _solved(losses, self.delta, tilt, window)
            is_enough = now > found / 2  # otherwise another θ may be better
            if not 0 < now < found:
                return min(found, now)
            found = now
        return found

    def _window(self, tilt: float) -> "Window":
        """Returns where all but e^-`HARDLY` of the tilted losses are."""
        at = _moment(self._coarse, tilt)
        below = [_moment(self._coarse, tilt - step) for step in tilt * SHARES]
        above = [_moment(self._coarse, tilt + step) for step in tilt * SHARES]
        lowest = (at - HARDLY - np.array(below)) / (tilt * SHARES)
        highest = (np.array(above) + HARDLY - at) / (tilt * SHARES)
        best = int(highest.argmin())
        return Window(lowest.max(), highest[best], tilt * (1 + SHARES[best]))


@dataclass(frozen=True)
class Window:
    """Bounds of the losses of all steps, and the Rényi order minus one that bounds them above."""

    lowest: float
    highest: float
    order: float


def _known(sigma: float, rate: float, direction: str, log_mass: float) -> tuple[Any, float, float]:
    """Returns dp-accounting's privacy loss of one step, and the smallest and largest loss.

    Args:
        log_mass: log of what may be outside of these two.
    """
    from dp_accounting.pld import privacy_loss_mechanism as mechanisms  # takes a second

    loss = mechanisms.GaussianPrivacyLoss(
        sigma, sampling_prob=rate, adjacency_type=mechanisms.AdjacencyType[direction],
        log_mass_truncation_bound=log_mass,
    )  # fmt: skip
    bounds = loss.connect_dots_bounds()
    return loss, float(bounds.epsilon_lower), float(bounds.epsilon_upper)


def _rounded(loss: Any, lower: float, upper: float, steps: int, interval: float) -> Losses:
    """Returns the losses of a step as multiples of an interval.

    Between two multiples l < m, the mass p under P and q under Q becomes a at l and b at m, where
    a + b = p and a e^-l + b e^-m = q. What is below all multiples is moved to the first one, and
    what is above to infinity.
    """
    first, last = math.floor(lower / interval), math.ceil(upper / interval)
    losses = interval * np.arange(first, last + 1)
    places = _inverse(loss, losses)
    upper_tail = loss.mu_upper_cdf(places)
    with np.errstate(divide="ignore", over="ignore"):
        log_lower_tail = loss.mu_lower_log_cdf(places)
        p = upper_tail[:-1] - upper_tail[1:]
        q = np.exp(log_lower_tail[:-1] + losses[:-1]) - np.exp(log_lower_tail[1:] + losses[:-1])
    b = np.clip((p - q) / -math.expm1(-interval), 0, p)
    mass = np.r_[p - b, 0] + np.r_[0, b]
    mass[0] += 1 - upper_tail[0]
    with np.errstate(divide="ignore"):
        return Losses(interval, first, np.log(mass), float(upper_tail[-1]), steps)


def _inverse(loss: Any, losses: np.ndarray) -> np.ndarray:
    """Returns `loss.inverse_privacy_loss` of many losses, infinite where there is none."""
    rate, sign = loss.sampling_prob, -1 if loss.adjacency_type.name == "ADD" else 1
    removed: np.ndarray = sign * losses
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        large = removed + np.log1p((rate - 1) * np.exp(-removed))
        ratio = np.where(removed > 1, large, np.log(np.expm1(removed) + rate)) - math.log(rate)
    ratio[np.isnan(ratio)] = -math.inf  # below log(1 − q)
    return sign * (-0.5 - loss.standard_deviation**2 * ratio)


def _moment(losses: list[Losses], tilt: float) -> float:
    """Returns log E e^{tilt·L} of all steps, of finite losses."""
    return sum(each.steps * float(np.logaddexp.reduce(each.tilted(tilt))) for each in losses)


def _solved(losses: list[Losses], delta: float, tilt: float, window: Window) -> tuple[float, float]:
    """Returns ε at δ, and the slope of −log δ there."""
    interval = losses[0].interval
    size = math.ceil((window.highest - window.lowest) / interval) + 2
    size = next_fast_len(max(size, *(len(each.log_mass) for each in losses)), real=True)
    start, shift, moment = math.floor(window.lowest / interval), 0, 0.0
    spectrum: Any = 1.0
    for each in losses:
        tilted = each.tilted(tilt)
        log_sum = float(np.logaddexp.reduce(tilted))
        spectrum = spectrum * rfft(np.exp(tilted - log_sum), size) ** each.steps
        shift, moment = shift + each.steps * each.first, moment + each.steps * log_sum
    mass = np.roll(irfft(spectrum, size), (shift - start) % size)
    rounding = 2.0**-50 * (sum(each.steps for each in losses) + math.log2(size)) * mass.max()
    mass = np.maximum(mass, 0) + rounding
    # Losses above the grid are found at its lower end, and are charged as infinite.
    beyond = math.exp(
        min(0.0, _moment(losses, window.order) - window.order * (start + size) * interval)
    )
    beyond -= sum(math.expm1(each.steps * math.log1p(-each.infinite)) for each in losses)
    if beyond > delta:
        return math.inf, 0.0
    multiples = np.arange(max(start, 1), start + size)
    at = multiples * interval
    with np.errstate(divide="ignore"):
        weights = np.log(mass[multiples - start]) + (moment - math.log(delta)) - tilt * at
    weights = np.exp(np.minimum(weights, 690.0))  # of δ; all that is larger is below ε

    def parts(k: int) -> tuple[float, float]:
        """Returns the weight of losses from the k-th one on, under P, and under Q times e^loss."""
        rest = weights[k:]
        return float(rest.sum()), float((rest * np.exp(at[k] - at[k:])).sum())

    low, high = -1, len(at) - 1  # δ(ε) is above its target at `low`, and not at `high`
    while high - low > 1:
        middle = (low + high) // 2
        upper, lower = parts(middle)
        if upper - lower + beyond / delta > 1:
            low = middle
        else:
            high = middle
    upper, lower = parts(high)
    slope = upper + beyond / delta - 1
    if slope <= 0:  # also at the smallest loss above 0
        return 0.0, 0.0
    return max(0.0, float(at[high]) + math.log(slope / lower)), slope
