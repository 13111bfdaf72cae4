"""The noise multiplier for (ε, δ) at any sampling rate and number of steps, fast."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from dp_clipping.accounting.target_epsilon import LOWEST_OF_OPACUS as LOWEST
from dp_clipping.accounting.target_epsilon import noise_multiplier_for

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64), 80, 100, 128, 192, 256, 512, 1024)
"""Rényi orders of the table: Opacus's, and higher ones, without which no ε below 0.3 is found."""

BETWEEN = 8.0  # at most this factor lies between two sampling rates or numbers of steps


class NoiseTable:
    """σ for which T steps at sampling rate q spend (ε, δ), by Opacus's RDP accountant.

    It is computed at the nodes of a grid, and interpolated in logarithms by a quadratic spline
    between them. σ is at least `LOWEST`, which spends less where that is much. RDP gives an upper
    bound of ε: its σ is 2 to 5 % above PRV's where that is 3 or more, and 50 % or more above it
    where that is small at a small rate. So take it to compare candidates, and `exact_noise` for
    the one that is trained.
    """

    def __init__(
        self, epsilon: float, delta: float, rates: tuple[float, float], steps: tuple[float, float]
    ) -> None:
        from scipy.interpolate import RectBivariateSpline

        q, t = nodes(*rates), nodes(*steps)
        found = [[exact_noise(epsilon, delta, a, round(b), "rdp", ORDERS) for b in t] for a in q]
        self._spline = RectBivariateSpline(np.log(q), np.log(t), np.log(found), kx=2, ky=2)

    def __call__(self, rate: Any, steps: Any) -> np.ndarray:
        """Returns σ; numbers or arrays that broadcast."""
        found = self._spline(np.log(rate), np.log(steps), grid=False)
        return np.maximum(np.exp(found), LOWEST)


def nodes(low: float, high: float) -> np.ndarray:
    """Returns three or more numbers from low to high, evenly spaced in logarithms."""
    count = max(3, 1 + math.ceil(math.log(high / low) / math.log(BETWEEN)))
    return np.geomspace(low, high, count)


def exact_noise(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    accountant: str,
    alphas: Sequence[float] | None = None,
) -> float:
    """Returns σ for (ε, δ) by an accountant, at least `LOWEST`; `alphas` are for `"rdp"`."""
    from opacus.accountants import create_accountant

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may be the last that it tries
        rdp = create_accountant(mechanism="rdp")
        rdp.history = [(LOWEST, rate, steps)]
        if rdp.get_epsilon(delta) <= epsilon:
            return LOWEST
        return noise_multiplier_for(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps,
            accountant=accountant, epsilon_tolerance=min(0.01, epsilon / 100), alphas=alphas,
        )  # fmt: skip
