"""Bounds what secure noise costs: accounts for what is computed, and not for real numbers.

Write g for the grid, d for the number of parameters' elements, σC for the standard deviation of the
noise and γ = mu / (1 − mu) with u = 2⁻²⁴, the unit of float32. A step releases round(sum / g) + k,
and three things differ from the Gaussian mechanism of the textbooks.

**The sum.** n contributions, each in m additions, are off by γnC at most, and neighbouring sums by
twice as much. A contribution counts as one number that is added.

**The grid.** Rounding moves two sums apart by √d·g ≤ 2⁻¹⁰ σC. The accountants get σ' with

    1 / σ' = (1 + 10⁻⁶)(1 + 2γn) / σ + 2⁻¹⁰.

**The sampler.** The noise of all steps, N pairs of values, and exact noise are
(ε_s, δ_s)-indistinguishable. Values are off by κ(|x| + |y|)s + c, s = σC / g, but for events of
probability 2^(1−j):

    ε_s = αρ + 120 ln 2 / (α − 1),    δ_s = (1 + steps)·2⁻¹²⁰ + N·2^(1−j)
    ρ = N(1.1 v/2 + 3·2⁻⁶⁴/α²),    v = 4.2(1.81 κs + 2κ + c)²,    κ = (2 + π)·2⁻⁶⁴.

If the mechanism with exact noise is (ε, δ)-private, then that with this noise is so with
ε + 2ε_s and e^ε_s·δ + δ_s(1 + e^(ε + ε_s)). `docs/proofs/secure_noise.md` has the proof.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dp_clipping.accounting.history import History, count

FINENESS = 10  # √d·g is at most 2⁻¹⁰ of σC

EXACTNESS = 1e-6  # of a contribution's norm above C: what tests of every mode allow
UNIT = 2.0**-24
LOG_SMALL = 120 * math.log(2)  # of 2¹²⁰: events of less than its inverse are charged to δ
KAPPA = (2 + math.pi) * 2.0**-64
MOST_SUMMATION = 1.0  # β from which on the worst case of rounding is no bound worth stating
SHARES = (0.99, 0.9, 0.5)  # of δ for the mechanism; the rest is for the sampler
LOWEST_TAIL = 64  # of j
LARGEST_EXPONENT = 700


def grid_of(std: float, dimension: int) -> float:
    """Returns g, the largest power of two that is at most std·2⁻¹⁰/√dimension.

    Rounding two sums to multiples of g can move them apart by √d·g.
    """
    return 2.0 ** math.floor(math.log2(std) - math.log2(dimension) / 2 - FINENESS)


@dataclass(frozen=True)
class Distance:
    """How far the noise of some steps is from exact noise: (ε_s, δ_s)-indistinguishable."""

    epsilon: float
    delta: float

    def fits(self, epsilon: float, share: float, delta: float) -> bool:
        """Returns whether it costs at most what δ has beside this share.

        Args:
            epsilon: of the mechanism with exact noise, at the share.
        """
        exponent = epsilon + self.epsilon
        if exponent > LARGEST_EXPONENT:
            return False
        return self.delta * (1 + math.exp(exponent)) <= (1 - share) * delta


@dataclass(frozen=True)
class Certificate:
    """Holds what the account of a run with secure noise includes.

    Attributes:
        dimension: d, of all parameters on all ranks.
        pairs: pairs of values that a step's noise is made of.
        most_units: n, units in a batch that are not exceeded but with probability 2⁻¹²⁰.
        additions: m, in which a contribution takes part; 0 before the first step.
    """

    dimension: int
    pairs: int
    most_units: int
    additions: int

    @property
    def summation(self) -> float:
        """Returns 2γn: how far float32 summation may move neighbouring sums apart, over C."""
        m = self.additions * UNIT
        return 2 * self.most_units * m / (1 - m) if m < 0.5 else math.inf

    def additions_of(self, part: int | None, ranks: int, backwards: int = 1) -> int:
        """Returns m for batches of which a rank sums parts of so many units at most, one by one.

        Args:
            part: None if it is not known.
            ranks: that have other units.
            backwards: of the step on this rank, each of which adds a sum. They may be more than
                the parts of a batch.
        """
        n = self.most_units
        return n if part is None else min(n, part + max(-(-n // part), backwards) + ranks)

    def as_a_whole(self) -> "Certificate":
        """Returns the certificate of steps whose batches are summed as a whole."""
        return replace(self, additions=self.most_units)

    def with_step(self, additions: int) -> "Certificate":
        """Returns the certificate with another step, of this m.

        Raises:
            ValueError: if rounding of their sums could move neighbours apart by more than C.
        """
        found = replace(self, additions=max(self.additions, additions))
        if found.summation > MOST_SUMMATION:
            raise ValueError(
                f"secure_mode=True has no account for this batch: {self.most_units} units are "
                f"possible, whose sum in float32 may move by {found.summation:.2g} of "
                "max_grad_norm by rounding alone; add them up in parts, as with "
                "BatchMemoryManager(data_loader=loader, max_physical_batch_size=64, "
                "optimizer=optimizer) as loader:, or sample fewer"
            )
        return found

    @property
    def grid(self) -> float:
        """Returns the bound of √d·g over σC."""
        return 2.0**-FINENESS

    def effective(self, noise_multiplier: float) -> float:
        """Returns σ', with which rounded sums have as much noise as exact ones have with σ."""
        if noise_multiplier == 0:
            return 0.0
        moved = (1 + EXACTNESS) * (1 + self.summation) / noise_multiplier
        return 1 / (moved + self.grid)

    def nominal(self, effective: float) -> float:
        """Returns σ for a σ': the inverse of `effective`; infinite if no σ suffices."""
        left = 1 / effective - self.grid
        return (1 + EXACTNESS) * (1 + self.summation) / left if left > 0 else math.inf

    def distance(self, steps: int) -> Distance:
        """Returns how far the noise of so many steps is from that of exact rounded Gaussians."""
        if self.pairs * steps == 0:
            return Distance(0.0, 0.0)
        scale = 2.0 ** (FINENESS + 1) * self.dimension**0.5  # s is below it
        number = self.pairs * steps
        rho = 1.1 * number * 4.2 * (1.81 * KAPPA * scale + _offset(scale)) ** 2 / 2
        # The rarest event that costs next to nothing in ε.
        epsilon = 1.05 * _epsilon_of(rho, number, LOWEST_TAIL, scale) + 1e-6
        tails = range(LOWEST_TAIL, 97)
        j = max(j for j in tails if _epsilon_of(rho, number, j, scale) <= epsilon)
        # The other small probability is that of steps with more units than `most_units`.
        return Distance(epsilon, (1 + steps) * 2.0**-120 + number * 2.0 ** (1 - j))

    def epsilon(
        self, history: History, delta: float, account: Callable[[History, float], float]
    ) -> float:
        """Returns ε with everything included; infinite where it cannot be shown at this δ.

        Args:
            account: ε of the Gaussian mechanism, of (σ', q, number of steps) and δ.
        """
        distance = self.distance(count(history))
        effective = [(self.effective(sigma), q, number) for sigma, q, number in history]
        for share in SHARES:
            epsilon = account(effective, share * delta * math.exp(-distance.epsilon))
            if distance.fits(epsilon, share, delta):
                return epsilon + 2 * distance.epsilon
        return math.inf

    def noise_multiplier(
        self, *, target_epsilon: float, target_delta: float, steps: int,
        find: Callable[..., float],
    ) -> float:  # fmt: skip
        """Returns σ with which so many steps end at (ε, δ), all that is above included.

        Args:
            find: the same of the Gaussian mechanism, `find(target_epsilon=.., target_delta=..)`.

        Raises:
            ValueError: if rounding moves sums too far, or the sampler is too far off.
        """
        whole = self.as_a_whole()  # whether batches are split is not known
        if whole.summation > MOST_SUMMATION:
            raise ValueError(
                "target_epsilon is for batches that are summed as a whole, of which "
                f"secure_mode=True has no account with {self.most_units} units: give "
                "engine.make_private(noise_multiplier=1.0, ..), and split batches with "
                "BatchMemoryManager"
            )
        distance = self.distance(steps)
        left = target_epsilon - 2 * distance.epsilon
        found = math.inf
        if left > 0:
            part = next((share for share in SHARES if distance.fits(left, share, target_delta)), 0)
            if not part:
                raise ValueError(
                    f"target_epsilon is {target_epsilon:g}: secure_mode=True cannot show so large "
                    f"an epsilon at target_delta={target_delta:g}, as it multiplies what the "
                    "sampler adds to delta by e^epsilon; give a smaller target_epsilon, or choose "
                    "the noise by make_private(noise_multiplier=..)"
                )
            share = part * target_delta * math.exp(-distance.epsilon)
            found = whole.nominal(find(target_epsilon=left, target_delta=share))
        if math.isinf(found):
            raise ValueError(
                f"target_epsilon is {target_epsilon:g}: secure_mode=True cannot reach it, as the "
                f"grid moves sums by {self.grid:.1g} of the noise and the sampler adds "
                f"{2 * distance.epsilon:.1g} to epsilon; give a larger target_epsilon"
            )
        return found

    def described(self, history: History, stds: list[float]) -> dict[str, Any]:
        """Returns what the account of these steps includes, by name, for people and files.

        Args:
            stds: σC of coming steps.
        """
        distance = self.distance(count(history))
        effective = [self.effective(sigma) for sigma, _, _ in history]
        return {
            "effective multiplier": min(effective, default=None),
            "parameters": self.dimension,
            "grid": [grid_of(std, self.dimension) for std in stds if std],
            "grid bound / noise": self.grid,
            "summation bound / C": self.summation,
            "most units in a batch": self.most_units,
            "most additions": self.additions,
            "sampler epsilon": 2 * distance.epsilon,
            "sampler delta": distance.delta,
        }

    def joined(self, other: "Certificate") -> "Certificate":
        """Returns a certificate that holds for the steps of both."""
        return Certificate(
            max(self.dimension, other.dimension), max(self.pairs, other.pairs),
            max(self.most_units, other.most_units), max(self.additions, other.additions),
        )  # fmt: skip


def _epsilon_of(rho: float, pairs: int, j: int, scale: float) -> float:
    """Returns ε_s, with the order α that is best among those that the proof allows for this j."""
    order = 1 + min(
        (LOG_SMALL / rho) ** 0.5,
        0.09 / _largest_logarithm(LOWEST_TAIL, scale),
        1 / _largest_logarithm(j, scale),
    )
    between = 3 * pairs * 2.0**-LOWEST_TAIL / order**2
    return order * (rho + between) + LOG_SMALL / (order - 1)


def _largest_logarithm(j: int, scale: float) -> float:
    """Returns a bound of a pair's log-ratio where u ≥ 2⁻ʲ, with the cell of u."""
    radius = (2 * j * math.log(2)) ** 0.5
    of_cell = 2.0 ** (j - 129) / radius**2
    return 2.04 * (2**0.5 * radius * scale * (KAPPA + of_cell) + _offset(scale))


def _offset(scale: float) -> float:
    """Returns 2κ + c."""
    return 2 * KAPPA + 2.0**-52 + 2.0**-78 * scale


def most_units_of(mean: float) -> int:
    """Returns a number that a Poisson batch exceeds with probability below 2⁻¹²⁰.

    Bernstein's inequality, P[n ≥ μ + t] ≤ exp(−t²/(2(μ + t/3))).

    Args:
        mean: μ, the expected number of units.
    """
    third = LOG_SMALL / 3
    return math.ceil(mean + third + (third**2 + 2 * LOG_SMALL * mean) ** 0.5)


def certificate_of(
    sizes: list[int], expected: float, sample_rate: float, units: int
) -> Certificate:
    """Returns the certificate of a run before its first step.

    With public rates it is the same for neighbouring data sets: the number of units counts only
    where it makes batches larger than was declared.

    Args:
        sizes: elements of each parameter, on all ranks.
        expected: the declared number of units in a batch, `expected_batch_size`.
        sample_rate: q.
        units: of the data set; a neighbour may have one more.
    """
    most = most_units_of(max(1.05 * expected + 2, sample_rate * (units + 1)))
    return Certificate(sum(sizes), sum(-(-n // 2) for n in sizes), most, 0)
