"""Correlated noise: each step subtracts a part of the noise of earlier steps, without storing it.

The noise of step t on a clipped sum is σC times

    Σ_j w_j z_{t-j},    0 ≤ j < min(b, t + 1),    z_s ~ N(0, I) independent,

where w_j are the first b coefficients of √(1 - x): 1, -1/2, -1/8, -1/16, -5/128, ... Their sum r is
small, so most of the noise of one step is taken back by later ones, and a model, which is a sum of
steps, keeps less of it: the banded inverse square root (N. Kalinin, R. McKenna, J. Upadhyay,
C. Lampert, Back to square roots: an optimal bound on the matrix factorization error for multi-epoch
differentially private SGD, 2025, arXiv:2505.12128). Every z_s has an address (`NoiseStream`) and is
generated again where it is needed, so nothing is stored, as N. Kalinin, R. McKenna, R. Pagh,
C. Lampert, DP-λCGD: efficient noise correlation for differentially private model training, 2026,
arXiv:2601.22334, do for b = 2.

**A planned number of epochs.** With few bands r is far from 0: it falls like 1/√b, and a sum of t
steps keeps r²t of noise. So where the n steps of the training are planned, the last band takes back
more: w_(b-1) = r - (w_0 + ... + w_(b-2)), for the r that makes the noise smallest that sums of
1, ..., n steps keep at equal ε, in the mean square: ‖AW‖²·s²/n, with A the prefix sums, and s the
sensitivity below. r is near √(2/n) for one epoch. The rule is our own; what it gains, beside the
best of all coefficients, is in `docs/mechanisms.md`.

**What it costs.** Let G [n, d] be the clipped sums of n steps, in units of C, and W [n, n] the
lower triangular Toeplitz matrix of w. The steps release G + σWz = W(W⁻¹G + σz): as much as one
Gaussian mechanism on W⁻¹G does. `sensitivity` is the largest norm by which one unit moves that.
With batches in a cycle it is the norm of W⁻¹u, where u is 1 in the steps 0, B, 2B, ... and 0 in
others. `docs/proofs/correlated_noise.md` has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dp_clipping.kinds import whole

EXAMPLE = 'make_private(.., noise_mechanism=CorrelatedNoise(bands=8), sampling="cyclic")'


@dataclass(frozen=True)
class CorrelatedNoise:
    """Noise of which later steps take back a part: `noise_mechanism` of `make_private`.

    It goes with `sampling="cyclic"`, whose account it is part of. Memory is that of independent
    noise; the time to generate noise grows with `bands`. Each step's noise is larger by up to
    √(4/π) = 1.13 than σC (√2 with `epochs`), and the sum of many steps' noise is smaller.

    Args:
        bands: b, the number of steps whose noise is in a step; 1 is independent noise.
        epochs: of the training, a public constant: the coefficients are those for so many. ε holds
            for any number of steps. Default: the coefficients of √(1 - x), which keep more noise.
        batches: of an epoch, which `make_private` fills in.

    Raises:
        ValueError: for anything but a whole number of 1 or more.
    """

    bands: int
    epochs: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        for name in ("bands", "epochs", "batches"):
            if (value := getattr(self, name)) is None and name != "bands":
                continue
            whole(f"1 or more, a whole number, as {EXAMPLE}").check(name, value)
            object.__setattr__(self, name, int(value))

    def __str__(self) -> str:
        named = f"correlated noise of {self.bands} bands"
        if self.epochs is None:
            return named
        named += f" for {self.epochs} epochs"
        if self.batches is None:
            return named
        return f"{named} of {self.batches} batches (sum {sum(self.weights(self.bands)):.9g})"

    def in_epochs_of(self, batches: int) -> CorrelatedNoise:
        """Returns this noise, for epochs of so many batches.

        Raises:
            ValueError: it is for other ones.
        """
        if self.batches not in (None, batches):
            raise ValueError(
                f"noise_mechanism is for epochs of {self.batches} batches, and an epoch has "
                f"{batches}: leave batches out, as {EXAMPLE}"
            )
        return replace(self, batches=batches)

    def weights(self, count: int) -> tuple[float, ...]:
        """Returns w_0 = 1, w_1, ... : `count` of them, or b if that is less.

        Raises:
            ValueError: if the number of batches is not known, on which they depend with `epochs`.
        """
        whole("a whole number, as weights(count=8)", least=0).check("count", count)
        if self.epochs is None:
            return _root(min(count, self.bands))
        if self.batches is None:
            raise ValueError(
                "the coefficients depend on the batches of an epoch: give them, as "
                f"CorrelatedNoise(bands={self.bands}, epochs={self.epochs}, batches=100)"
            )
        return _planned(self.bands, self.epochs * self.batches, self.batches)[:count]

    def sensitivity(self, steps: int, batches: int) -> float:
        """Returns the largest norm by which one unit moves W⁻¹G, in units of C.

        Args:
            steps: n, the steps taken so far.
            batches: B, the batches of a cycle: a unit is in one of them, so in ⌈n / B⌉ steps at
                most.

        Raises:
            ValueError: for a negative number of steps, or less than one batch.
        """
        for name, value, least in (("steps", steps, 0), ("batches", batches, 1)):
            wanted = f"a whole number, {least} or more, as sensitivity(steps=300, batches=100)"
            whole(wanted, least).check(name, value)
        noise = self if self.epochs is None or self.batches else self.in_epochs_of(batches)
        moved = _moved(noise.weights(noise.bands), steps, batches)
        return math.sqrt(moved @ moved)


@lru_cache(maxsize=64)
def _root(count: int) -> tuple[float, ...]:
    """Returns the first coefficients of √(1 - x)."""
    weights = [1.0]
    for j in range(1, count):
        weights.append(weights[-1] * (j - 1.5) / j)
    return tuple(weights)


@lru_cache(maxsize=64)
def _planned(bands: int, steps: int, batches: int) -> tuple[float, ...]:
    """Returns the coefficients of √(1 - x), but for the last one, which is for these steps."""
    root = _root(bands)
    before = root[:-1]
    found = [(*before, rest - sum(before)) for rest in _rests(steps) if rest <= sum(before)]

    return min([root, *found], key=lambda weights: _kept(weights, steps, batches))


def _rests(steps: int) -> Iterator[float]:
    """Yields candidates of r, from 15/16 to 1/(4√n): 8 per octave, each exact in binary."""
    octave = 1.0
    while octave > 0.25 / math.sqrt(steps):
        octave /= 2
        yield from (octave * eighth / 8 for eighth in range(15, 7, -1))


def _kept(weights: tuple[float, ...], steps: int, batches: int) -> float:
    """Returns the squares of what sums of 1, ..., n steps keep of noise of μ = 1: s²‖AW‖²."""
    moved = _moved(weights, steps, batches)
    column = np.zeros(steps)
    column[: len(weights)] = weights[:steps]
    squares = np.cumsum(column) ** 2
    return float(moved @ moved * (squares @ np.arange(steps, 0, -1)))


def _moved(weights: tuple[float, ...], steps: int, batches: int) -> np.ndarray:
    """Returns W⁻¹u, what a unit in steps 0, B, 2B, ... moves: u is 1 in those and 0 in others."""
    from scipy.signal import lfilter  # takes a second

    used = np.zeros(steps)
    used[::batches] = 1.0
    return lfilter([1.0], weights, used)  # v_t = u_t - Σ_{j≥1} w_j v_{t-j}
