"""The default accountant: ε by dp-accounting's privacy loss distributions, for any σ.

dp-accounting rounds the privacy loss L of a step to multiples of an interval so that δ only grows
("Connect the Dots", Doroshenko et al. 2022, arXiv 2207.04380), and composes steps by FFT. So the
result is an upper bound for any interval. The interval decides how much ε grows and how long that
takes, and is chosen here. A loss between two multiples of h is split between them with the same
mass under both data sets, which multiplies its E e^{αL} by at most 1 + α(α+1)h²/8. So T steps cost
at most T(α+1)h²/8 more where −log δ has the slope α, and h is where this is `TOLERANCE` of ε. α is
that of Rényi differential privacy, and so is the first ε.

An FFT in double precision also rounds: at 100,000 steps and δ = 1e-12 dp-accounting is 3 % below
the truth. So δ is lowered by `ROUNDING` a step first. Where nothing is left of it, ε is that of
Rényi differential privacy, which can be far above the truth where ε is large.
"""

import math
from collections.abc import Callable, MutableMapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

from dp_clipping.accounting.history import History, joined, totals_of
from dp_clipping.accounting.tradeoff import SMALLEST, tabulated

TOLERANCE = 0.004
"""Rounding adds at most about this part of ε; a quarter of it where ε is small."""

ENOUGH = 0.7
"""An ε that is smaller than this part of the one before is computed once more."""

MOST_STEPS = 1_000_000
"""The most steps that are composed; of more, ε is that of Rényi differential privacy."""

WIDEST = 100.0
"""The largest interval: e to its power is a double."""

LARGEST = 1 << 20
"""Multiples of the interval up to ε; where more are needed, ε is larger instead."""

MOST_ENTRIES = 40
"""Pairs of σ and q that are composed. Of more, neighbours count as the one with least noise."""

FEW = 3
"""Pairs of which Rényi differential privacy is computed: each takes 35 ms."""

ORDERS = [*range(2, 64), *(2**k for k in range(6, 13))]
"""Orders of Rényi differential privacy."""

ROUNDING = 2.0**-50
"""The error of δ per composed distribution, at most, of an FFT in double precision."""


class PLDAccountant:
    """Keeps a history as Opacus's accountants do, and computes ε by `epsilon`.

    It has their methods, and `interface` makes it one of them.

    Attributes:
        history: (noise multiplier, sample rate, number of steps) of successive steps.
    """

    def __init__(self) -> None:
        self.history: History = []

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

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns a step hook for an optimizer of Opacus, which counts its steps."""

        def count(optimizer: Any) -> None:
            rate = sample_rate * optimizer.accumulated_iterations
            self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

        return count

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> Any:
        """Returns the history and the mechanism's name, in `destination` if it is given."""
        state = {} if destination is None else destination
        state.update(history=deepcopy(self.history), mechanism=self.mechanism())
        return state

    def load_state_dict(self, state_dict: MutableMapping[str, Any]) -> None:
        """Takes the history of what `state_dict` returned.

        Raises:
            ValueError: it is another mechanism's, or none.
        """
        if state_dict.get("mechanism") != self.mechanism():
            raise ValueError(
                f"state_dict has the mechanism {state_dict.get('mechanism')!r}, and this "
                f"accountant {self.mechanism()!r}: give what its own state_dict() returned"
            )
        self.history = state_dict["history"]


def interface() -> type:
    """Returns Opacus's base class of accountants, of which `PLDAccountant` is one from now on.

    Importing Opacus takes a second: what only trains does not wait for it.
    """
    from opacus.accountants import IAccountant

    IAccountant.register(PLDAccountant)
    return IAccountant


def epsilon(history: History, delta: float) -> float:
    """Returns ε at δ of Gaussian noise on Poisson batches, for adding or removing one unit.

    An upper bound. Infinite if a step had no noise, and 0 of no steps.

    Raises:
        ValueError: unless 0 < δ < 1, and for a sample rate above 1.
    """
    return _near(history, delta)[0](delta)


def curve(history: History, delta: float) -> Callable[[float], float]:
    """Returns ε as a function of δ, an upper bound for each.

    Steps are composed once, with the interval that the smallest δ of a curve needs, but for those
    of which an FFT leaves nothing; where ε is far smaller than there, rounding is a larger part.
    """
    charge = ROUNDING * sum(steps for _, _, steps in history)
    least = min(delta, SMALLEST)
    at, composed = _near(history, least if least > 2 * charge else SMALLEST)
    if composed is None:
        return at
    table = tabulated(composed.get_delta_for_epsilon, at(least), charge)
    return lambda delta: table(delta) if delta > 2 * charge else at(delta)


def _near(history: History, delta: float) -> tuple[Callable[[float], float], Any]:
    """Returns ε as a function of δ, and the distribution that it is computed from, if any.

    The interval is the one for this δ.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}: give a number above 0 and below 1")
    if any(not sigma > 0 for sigma, _, _ in history):
        return lambda _: math.inf, None
    entries = merged([
        (float(sigma), float(rate), int(steps))
        for (sigma, rate), steps in totals_of(history).items()
        if rate and steps and sigma < math.inf
    ])  # fmt: skip
    if not entries:
        return lambda _: 0.0, None
    few = merged(entries, FEW)
    steps = sum(steps for _, _, steps in entries)
    charge, composed = steps * ROUNDING, None

    def at(delta: float) -> float:
        found, rest = _renyi(few, delta)[0], delta - charge
        if composed is None or rest <= 0:
            return found
        return min(found, float(composed.get_epsilon_for_delta(rest)))

    order = _renyi(few, delta)[1]
    found, last = at(delta), math.inf
    while (
        steps <= MOST_STEPS and delta > charge and 0 < found < ENOUGH * last
    ):  # a smaller ε has a smaller interval
        tolerance = TOLERANCE * min(1.0, max(0.25, found))
        wanted = math.sqrt(8 * tolerance * found / (steps * (order + 1)))
        interval = min(max(wanted, found / LARGEST), WIDEST)
        interval = 2 ** (math.floor(2 * math.log2(interval)) / 2)  # the same for similar δ
        composed = _composed(tuple(entries), interval)
        last, found = found, at(delta)
    return at, composed


def merged(entries: History, most: int = MOST_ENTRIES) -> History:
    """Returns entries that cost no less, at most `most` of them.

    A noisier or less often sampled step is a random function of the other one. So steps of similar
    σ and q cost at most what they would with the least σ and the largest q among them.
    """
    cells = {entry[:2]: [entry] for entry in entries}
    width = 1e-3
    while len(cells) > most:
        cells = {}
        for sigma, rate, steps in entries:
            cell = math.floor(math.log(sigma) / width), math.floor(math.log(rate) / width)
            cells.setdefault(cell, []).append((sigma, rate, steps))
        width *= 1.5
    return [
        (min(s for s, _, _ in cell), max(q for _, q, _ in cell), sum(n for _, _, n in cell))
        for cell in cells.values()
    ]


def _renyi(entries: History, delta: float) -> tuple[float, int]:
    """Returns ε at δ by Rényi differential privacy, and the order that gives it."""
    found, order = _divergences(tuple(entries)).get_epsilon_and_optimal_order(delta)
    return float(found), int(order)


@lru_cache(16)
def _divergences(entries: tuple[tuple[float, float, int], ...]) -> Any:
    """Returns dp-accounting's accountant of all steps, which many δ are asked of."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp  # takes a second

    accountant = rdp.RdpAccountant(ORDERS)
    for sigma, rate, steps in entries:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    return accountant


@lru_cache(16)
def _composed(entries: tuple[tuple[float, float, int], ...], interval: float) -> Any:
    """Returns dp-accounting's privacy loss distribution of all steps."""
    from dp_accounting.pld import privacy_loss_distribution as distributions

    whole = None
    for sigma, rate, steps in entries:
        one = distributions.from_gaussian_mechanism(
            sigma, sampling_prob=rate, value_discretization_interval=interval
        ).self_compose(steps)
        whole = one if whole is None else whole.compose(one)
    return whole
