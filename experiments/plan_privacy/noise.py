"""The noise multiplier for (ε, δ) at any sampling rate and number of steps, fast."""

import math
import warnings
from typing import Any

import numpy as np

from dp_clipping.accounting.target_epsilon import LOWEST, epsilon_at_end, noise_multiplier_for

BETWEEN = 8.0  # at most this factor lies between two sampling rates or numbers of steps


class NoiseTable:
    """σ for which T steps at sampling rate q spend (ε, δ), by Opacus's RDP accountant.

    It is computed at the nodes of a grid, and interpolated in logarithms by a quadratic spline
    between them. σ is at least `LOWEST`, which spends less where that is much. RDP gives an upper
    bound of ε, so σ is up to a tenth above what PRV finds: take it to compare candidates, and
    `exact_noise` for the one that is trained.
    """

    def __init__(
        self, epsilon: float, delta: float, rates: tuple[float, float], steps: tuple[float, float]
    ) -> None:
        from scipy.interpolate import RectBivariateSpline

        q, t = nodes(*rates), nodes(*steps)
        found = [[exact_noise(epsilon, delta, a, round(b), "rdp") for b in t] for a in q]
        self._spline = RectBivariateSpline(np.log(q), np.log(t), np.log(found), kx=2, ky=2)

    def __call__(self, rate: Any, steps: Any) -> np.ndarray:
        """Returns σ; numbers or arrays that broadcast."""
        found = self._spline(np.log(rate), np.log(steps), grid=False)
        return np.maximum(np.exp(found), LOWEST)


def nodes(low: float, high: float) -> np.ndarray:
    """Returns three or more numbers from low to high, evenly spaced in logarithms."""
    count = max(3, 1 + math.ceil(math.log(high / low) / math.log(BETWEEN)))
    return np.geomspace(low, high, count)


def exact_noise(epsilon: float, delta: float, rate: float, steps: int, accountant: str) -> float:
    """Returns σ for (ε, δ) by an accountant, at least `LOWEST`."""
    from opacus.accountants import create_accountant

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may be the last that it tries
        rdp = create_accountant(mechanism="rdp")
        if epsilon_at_end(rdp, LOWEST, rate, steps, delta) <= epsilon:
            return LOWEST
        return noise_multiplier_for(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps,
            accountant=accountant, epsilon_tolerance=min(0.01, epsilon / 100),
        )  # fmt: skip
