"""Growth of a quantity with the length of samples: the exponent of a power and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
MIN_LENGTHS = 3  # lengths of a fit with an interval


@dataclass(frozen=True)
class Growth:
    """A power law y ≈ factor · T^exponent, fitted to `count` lengths.

    `low` to `high` is the exponent's 95 % interval, None with two lengths.
    """

    exponent: float
    factor: float
    low: float | None
    high: float | None
    count: int

    def at(self, length: float) -> float:
        return self.factor * length**self.exponent

    def __str__(self) -> str:
        doubt = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"T^{self.exponent:.2f}{doubt}"


def fit_growth(lengths: Sequence[int], values: Sequence[float]) -> Growth | None:
    """Fits a power law by least squares in logarithms, with an interval by Student's t.

    Returns None for fewer than two lengths or a value that is not positive.
    """
    if len(set(lengths)) < 2 or not all(v > 0 and math.isfinite(v) for v in values):
        return None
    from scipy.stats import linregress, t  # opacus brings it

    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    line = linregress(x, y)
    low = high = None
    if len(lengths) >= MIN_LENGTHS:
        half = float(t.ppf((1 + CONFIDENCE) / 2, len(lengths) - 2) * line.stderr)
        low, high = float(line.slope) - half, float(line.slope) + half
    return Growth(float(line.slope), math.exp(line.intercept), low, high, len(lengths))
