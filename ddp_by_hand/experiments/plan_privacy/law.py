"""What a scaling law is: loss from model size, steps and noise-batch ratio, within ranges.

M is the number of parameters, T the number of steps, σ̄ = σ / batch the noise-batch ratio: the
standard deviation of the noise on the mean clipped gradient, in units of C. `parametric` has the
paper's formula, `curves` its interpolation between measured runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np


class Observation(NamedTuple):
    """The loss that a training of M parameters reached after T steps at a noise-batch ratio."""

    parameters: float
    steps: float
    ratio: float
    loss: float


@dataclass(frozen=True)
class Law:
    """A fitted law. Ranges are (least, most) of what it was fitted to; `tokens` are per example.

    `deviation` is the mean of |predicted / observed − 1| over the losses that it was fitted to, or
    over those that were left out of a fit, as the subclass says.
    """

    parameters: tuple[float, float]
    steps: tuple[float, float]
    ratios: tuple[float, float]
    tokens: int
    unit: str
    source: str
    deviation: float
    compared: ClassVar[str] = "on what it was fitted to"

    def loss(self, parameters: Any, steps: Any, ratio: Any) -> Any:
        """Returns the predicted loss; numbers or arrays that broadcast."""
        raise NotImplementedError

    def beyond(self, parameters: float, steps: float, ratio: float) -> list[str]:
        """Names what lies outside of the ranges that the law was fitted to."""
        asked = {"parameters": parameters, "steps": steps, "ratios": ratio}
        found = []
        for name, value in asked.items():
            low, high = getattr(self, name)
            if not 0.99 * low <= value <= 1.01 * high:
                found.append(f"{name} {value:,.3g}, fitted on {low:,.3g} to {high:,.3g}")
        return found

    def at_end(self, parameters: float, steps: float) -> list[str]:
        """Names the ranges at whose end this lies: beyond it there may be a better training."""
        asked = {"parameters": parameters, "steps": steps}
        ends = {name: getattr(self, name) for name in asked}
        return [f"{value:,.3g} {name}" for name, value in asked.items()
                if not 1.01 * ends[name][0] < value < 0.99 * ends[name][1]]  # fmt: skip


def ranges_of(seen: Sequence[Observation]) -> dict[str, tuple[float, float]]:
    """Returns the ranges of a law that is fitted to these."""
    columns = zip(("parameters", "steps", "ratios"), np.array(seen, float).T, strict=False)
    return {name: (float(column.min()), float(column.max())) for name, column in columns}
