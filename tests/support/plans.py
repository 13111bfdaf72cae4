"""A scaling law and a formula of the noise, for tests of plans."""

import numpy as np
import pytest

from ddp_by_hand.experiments.plan_privacy import plan
from ddp_by_hand.experiments.plan_privacy.parametric import Exponents, ParametricLaw

TRUE = ParametricLaw(
    parameters=(1e4, 1e6), steps=(50.0, 800.0), ratios=(1e-4, 1e-1), tokens=64, unit="nats",
    source="made up", deviation=0.0, coefficients=(1.0, 20.0, 30.0, 4.0),
    exponents=Exponents(0.3, 0.6, 1.2, -0.1),
)  # fmt: skip


def quick_noise(patches: pytest.MonkeyPatch) -> list[tuple]:
    """Gives planners noise by a formula, which takes no time; returns the arguments of each."""
    made = []

    class Formula:
        def __init__(self, epsilon, delta, rates, steps):
            self.epsilon = epsilon
            made.append((epsilon, delta, rates, steps))

        def __call__(self, rate, steps):
            found = np.asarray(rate) * np.sqrt(np.asarray(steps)) * 4 / self.epsilon
            return np.maximum(found, 0.5)

    patches.setattr(plan, "NoiseTable", Formula)
    return made
