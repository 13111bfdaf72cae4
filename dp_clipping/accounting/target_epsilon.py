"""Finds the noise multiplier that ends a training at a given ε."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dp_clipping.accounting.mechanism import DEFAULT, Epsilon, Mechanism
from dp_clipping.kinds import positive

LOWEST = 0.05
"""Smallest σ that is searched for."""

LOWEST_OF_OPACUS = 0.2
"""The same for Opacus's accountants: below it its PRV accountant takes minutes per value."""
HIGHEST = 1e6
"""Largest σ that is searched for."""

MOST_BELOW = 0.01
"""The part of a target that ε may be below it, however large the tolerance: at a target of 0.01
one of 0.01 would take any σ, and σ is doubled until it is large enough."""

PRECISION = 1e-9
"""Relative width of σ at which a search ends, whatever the tolerance."""

NO_NOISE = (
    "target_epsilon is {target:g}: with noise_multiplier {lowest:g} epsilon is {most:.3g} at most, "
    "and the search ends there; give a smaller target_epsilon, or choose the noise by "
    "make_private(noise_multiplier=..)"
)


@dataclass(frozen=True)
class Plan:
    """The training that a noise multiplier was computed for.

    Attributes:
        epsilon, delta: at its end.
        steps: how many there are.
        noise_multiplier: σ in all of them.
        stop: the training ends after them.
    """

    epsilon: float
    delta: float
    steps: int
    noise_multiplier: float
    stop: bool

    def missed_by(self, steps: int, noise_multiplier: float) -> tuple[str, str]:
        """Returns why a step after `steps` others misses the target, and what to do; "" if not.

        Raises:
            RuntimeError: for one more than were planned, with `stop`.
        """
        if steps >= self.steps:
            what = f"the {self.steps} steps that target_epsilon={self.epsilon:g} is for are taken"
            if self.stop:
                raise RuntimeError(
                    f"{what}, and stop=True ends the training there: take batches from the "
                    "data_loader that make_private_with_epsilon returned, which yields no more"
                )
            return what, "give the epochs of the whole training, or stop=True to end it there"
        if noise_multiplier < self.noise_multiplier:
            return (
                f"noise_multiplier is below the {self.noise_multiplier:.4g} that target_epsilon="
                f"{self.epsilon:g} needs in each step", "leave it as it is",
            )  # fmt: skip
        return "", ""


def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str,
    epsilon_tolerance: float = 0.01,
    alphas: Sequence[float] | None = None,
    mechanism: Mechanism = DEFAULT,
) -> float:
    """Returns σ with which `steps` steps end at (ε, δ), as accountant or mechanism computes it.

    With Opacus's accountants it is the result of Opacus's search.

    Args:
        sample_rate: probability of a sample to be in a step's batch.
        steps: the number of steps of the whole training.
        accountant: `"pld"`, `"prv"` or `"rdp"`.
        epsilon_tolerance: the search ends when ε is at most this far below its target, and, but for
            Opacus's accountants, at most a hundredth of it.
        alphas: Rényi orders that accountant `"rdp"` tries; default: Opacus's.
        mechanism: what a step releases.

    Raises:
        ValueError: if a σ below the smallest one would do, or the accountant finds none; for orders
            with another accountant, a tolerance that is not above 0, and accountant `"gdp"`.
    """
    options: dict[str, Any] = {}
    if alphas is not None:
        if accountant != "rdp" or mechanism.epsilon is not None:
            here = f'"{accountant}"' if mechanism.epsilon is None else mechanism.accountant
            raise ValueError(
                f'alphas are for accountant "rdp", and ε is that of {here}: leave them out, or '
                'build PrivacyEngine(accountant="rdp")'
            )
        options["alphas"] = list(alphas)
    positive("a finite number above 0").check("epsilon_tolerance", epsilon_tolerance)
    search = (target_epsilon, target_delta, sample_rate, steps, epsilon_tolerance)
    if mechanism.epsilon is not None:
        return _search(mechanism.epsilon, LOWEST_OF_OPACUS, *search)
    if accountant == "gdp":
        raise ValueError(
            "accountant gdp states an approximation that may be below the true epsilon, so "
            'target_epsilon would not hold: build PrivacyEngine(accountant="pld")'
        )
    if accountant == "pld":
        from dp_clipping.accounting import pld  # importing Opacus takes seconds

        # Its ε moves by steps of its rounding, which is a part of ε.
        search = (*search[:-1], max(search[-1], 1e-3 * target_epsilon))
        return _search(lambda parts, delta: pld.epsilon(parts[0], delta), LOWEST, *search)
    from opacus.accountants.utils import get_noise_multiplier  # importing Opacus takes seconds

    most = _epsilon_of_lowest(target_delta, sample_rate, steps)
    if target_epsilon >= most:
        raise ValueError(NO_NOISE.format(target=target_epsilon, lowest=LOWEST_OF_OPACUS, most=most))
    try:
        return get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant=accountant,
            epsilon_tolerance=epsilon_tolerance,
            **options,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"target_epsilon is {target_epsilon:g}: accountant {accountant} finds no "
            f"noise_multiplier for it ({error}); give another target_epsilon or accountant, a "
            "target_delta far below 1 / samples, or "
            "choose the noise by make_private(noise_multiplier=..)"
        ) from error


def _search(
    of: Epsilon, lowest: float, target: float, delta: float, rate: float, steps: int,
    tolerance: float,
) -> float:  # fmt: skip
    """Returns σ whose ε is at most `tolerance`, and a hundredth of its target, below that.

    log ε is almost linear in log σ, so the next σ is where a line between the two ends crosses the
    middle of the tolerance; and it halves the interval where the line has moved one end twice.
    """

    def epsilon(sigma: float) -> float:
        return of([[(sigma, rate, steps)]], delta)

    low, high = lowest, 2 * lowest  # ε is above its target at `low`, where it is `above`
    above = math.inf
    while (found := epsilon(high)) > target:
        low, high, above = high, 2 * high, found
        if high > HIGHEST:
            raise ValueError(
                f"target_epsilon is {target:g}: with noise_multiplier {low:g} epsilon is "
                f"{found:.3g}; give a larger target_epsilon, or fewer epochs"
            )
    if low == lowest and (above := epsilon(low)) <= target:
        raise ValueError(NO_NOISE.format(target=target, lowest=lowest, most=above))
    moved, is_stuck = None, False
    tolerance = min(tolerance, MOST_BELOW * target)
    while found < target - tolerance and high / low > 1 + PRECISION:
        share = 0.5
        if not is_stuck and 0 < found < above < math.inf:
            share = math.log(above / (target - tolerance / 2)) / math.log(above / found)
        middle = low * (high / low) ** min(0.95, max(0.05, share))
        at = epsilon(middle)
        is_stuck, moved = moved == (at > target), at > target
        if at > target:
            low, above = middle, at
        else:
            high, found = middle, at
    return high


def _epsilon_of_lowest(delta: float, sample_rate: float, steps: int) -> float:
    """Returns an upper bound of ε under the smallest σ: that of Rényi, which is fast to compute."""
    from opacus.accountants import create_accountant

    accountant = create_accountant(mechanism="rdp")
    accountant.history = [(LOWEST_OF_OPACUS, sample_rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its best order may be the last that it tries
        return float(accountant.get_epsilon(delta=delta))
