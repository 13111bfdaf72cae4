"""Correlated noise: each step subtracts a part of the noise of earlier steps, without storing it.

The noise of step t on a clipped sum is σC times

    Σ_j w_j z_{t-j},    0 ≤ j < min(b, t + 1),    z_s ~ N(0, I) independent,

where w_j are the first b coefficients of √(1 - x): 1, -1/2, -1/8, -1/16, -5/128, ... They add up to
almost 0, so most of the noise of one step is taken back by later ones, and a model, which is a sum
of steps, keeps less of it: the banded inverse square root (N. Kalinin, R. McKenna, J. Upadhyay,
C. Lampert, Back to square roots: an optimal bound on the matrix factorization error for multi-epoch
differentially private SGD, 2025, arXiv:2505.12128). Every z_s has an address (`NoiseStream`) and is
generated again where it is needed, so nothing is stored, as N. Kalinin, R. McKenna, R. Pagh,
C. Lampert, DP-λCGD: efficient noise correlation for differentially private model training, 2026,
arXiv:2601.22334, do for b = 2.

**What it costs.** Let G [n, d] be the clipped sums of n steps, in units of C, and W [n, n] the
lower triangular Toeplitz matrix of w. The steps release G + σWz = W(W⁻¹G + σz): as much as one
Gaussian mechanism on W⁻¹G does. `sensitivity` is the largest norm by which one unit moves that.
With batches in a cycle it is the norm of W⁻¹u, where u is 1 in the steps 0, B, 2B, ... and 0 in
others. `docs/proofs/correlated_noise.md` has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from dp_clipping.kinds import check_count

EXAMPLE = 'make_private(.., noise_mechanism=CorrelatedNoise(bands=8), sampling="cyclic")'


@dataclass(frozen=True)
class CorrelatedNoise:
    """Noise of which later steps take back a part: `noise_mechanism` of `make_private`.

    It goes with `sampling="cyclic"`, whose account it is part of. Memory is that of independent
    noise; the time to generate noise grows with `bands`. Each step's noise is larger by up to
    √(4/π) = 1.13 than σC, and the sum of many steps' noise is smaller.

    Args:
        bands: b, the number of steps whose noise is in a step; 1 is independent noise.

    Raises:
        ValueError: for anything but a whole number of 1 or more.
    """

    bands: int

    def __post_init__(self) -> None:
        check_count("bands", self.bands, f"a whole number of 1 or more, as {EXAMPLE}")
        if self.bands < 1:
            raise ValueError(f"bands is {self.bands}: give 1 or more, as {EXAMPLE}")
        object.__setattr__(self, "bands", int(self.bands))

    def __str__(self) -> str:
        return f"correlated noise of {self.bands} bands"

    def weights(self, count: int) -> tuple[float, ...]:
        """Returns w_0 = 1, w_1, ... : `count` of them, or b if that is less."""
        return _weights(min(count, self.bands))

    def sensitivity(self, steps: int, batches: int) -> float:
        """Returns the largest norm by which one unit moves W⁻¹G, in units of C.

        Args:
            steps: n, the steps taken so far.
            batches: B, the batches of a cycle: a unit is in one of them, so in ⌈n / B⌉ steps at
                most.

        Raises:
            ValueError: for a negative number of steps, or less than one batch.
        """
        if steps < 0 or batches < 1:
            raise ValueError(f"give steps ≥ 0 and batches ≥ 1, got {steps} and {batches}")
        return _participation(self.bands, batches).norm(steps)


@lru_cache(maxsize=64)
def _weights(count: int) -> tuple[float, ...]:
    """Returns the first coefficients of √(1 - x)."""
    weights = [1.0]
    for j in range(1, count):
        weights.append(weights[-1] * (j - 1.5) / j)
    return tuple(weights)


class _Participation:
    """Computes what a unit in steps 0, B, 2B, ... adds up to in W⁻¹G: v = W⁻¹u, as far as asked.

    u is 1 in those steps and 0 in others; W v = u, row by row: v_t = u_t - Σ_{j≥1} w_j v_{t-j}.
    """

    def __init__(self, bands: int, batches: int) -> None:
        self._bands, self._batches = bands, batches
        self._values: list[float] = []
        self._squares = [0.0]  # of the first values, added up

    def norm(self, steps: int) -> float:
        values, squares = self._values, self._squares
        weights = _weights(min(self._bands, steps))[1:] if steps else ()
        for t in range(len(values), steps):
            value = float(t % self._batches == 0)
            for weight, before in zip(weights, reversed(values), strict=False):
                value -= weight * before
            values.append(value)
            squares.append(squares[-1] + value * value)
        return math.sqrt(squares[steps])


_participation = lru_cache(maxsize=16)(_Participation)
