"""Records one step on neighbouring data: what the outputs of a private step tell about one unit.

Each replay makes a private run of a copy of the network, with one key, and takes its first steps on
a batch of all units. Only what `make_private` returns is called, and only `.grad` is read. So a
replay sees what a comparison of per-sample gradients cannot: state that samples share, a divisor
that depends on the batch, noise that depends on the data.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_clipping.audit.noise import Parameter, faults_of
from dp_clipping.clipping.statistics import NOT_COVERED
from dp_clipping.table import aligned

HOSTILE = -1000.0
"""A unit's loss is also multiplied by this: then its gradient is clipped, and points backward."""
TOLERANCE = 1e-3  # of C, for the rounding of float32 sums
MOST_ROUNDING = 0.1  # of σC, up to which the numbers of the noise are looked at one by one
DEVIATIONS = 6.0  # of a statistic of the noise, which are chance


@dataclass(frozen=True)
class RecordedStep:
    """Holds `.grad` of one step of one replay, times the divisor, float64 on the CPU.

    Attributes:
        total: all parameters in one vector [n].
        parameters: which of them is where.
        clip_norm: C.
        precision: the largest relative rounding error of a number of `.grad`.
    """

    total: Tensor
    clip_norm: float
    precision: float
    parameters: Sequence[Parameter] = ()


STEPS = 8
"""Steps whose noise is looked at."""

Replay = Callable[[Sequence[int], Sequence[float], float, int], list[RecordedStep]]
"""Units of the batch, what the loss of each is multiplied by, σ, n -> n steps of the same sums."""


@dataclass(frozen=True, eq=False)
class RecordedSums:
    """The sums of a step on data with and without one unit. Not covered by ε.

    Attributes:
        clip_norm: C, how far one unit may move the sum.
        distances: ‖sum with the unit − sum without it‖ of each unit that was removed.
        hostile: the same of the unit with its loss multiplied by `HOSTILE`.
        noise_multiplier: σ as stated; 0: the noise was not looked at.
        noise_std: the standard deviation of the noise on a sum, over all numbers.
        chance: by how much chance may move `noise_std`.
        rounding: by how much rounding of `.grad` may move a sum; `noise_rounding`, the noise, as a
            multiple of σC.
        noise_depends_on_data: the largest difference of the noise with a unit and without it, as a
            multiple of σC.
        repetition: the correlation of the noise of two steps.
        noise_faults: what tests of the noise of each parameter and step have found (`audit.noise`).
        numbers: trainable numbers.
        in_evaluation: the network is random in training, as with dropout, so its modules were in
            evaluation.
        is_random: two replays of the same differ in evaluation too.
    """

    clip_norm: float
    distances: Tensor
    hostile: Tensor
    noise_multiplier: float
    noise_std: float
    chance: float
    rounding: float
    noise_rounding: float
    noise_depends_on_data: float
    repetition: float
    numbers: int
    in_evaluation: bool
    is_random: bool
    noise_faults: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """Lists what contradicts the guarantee; empty if nothing does."""
        if self.is_random:
            return [
                "two replays of the same step differ: the network or the criterion is random in "
                "evaluation too, say by torch.rand, so sums cannot be compared"
            ]
        found, most = [], self.clip_norm * (1 + TOLERANCE) + self.rounding
        for name, distances in (
            ("unit {}", self.distances),
            (f"unit {{}} with its loss times {HOSTILE:g}", self.hostile),
        ):  # fmt: skip
            worst = int(distances.argmax())
            if not float(distances.max()) <= most:
                found.append(
                    f"{name.format(worst)} moves the sum by {float(distances[worst]):.4g}, and C "
                    f"is {self.clip_norm:.4g}"
                )
        if self.noise_multiplier:
            std = self.noise_multiplier * self.clip_norm
            if not self.noise_std >= std - self.chance:
                found.append(
                    f"the noise has standard deviation {self.noise_std:.4g}, and {std:.4g} is "
                    "stated"
                )
            if not self.noise_depends_on_data <= TOLERANCE + self.noise_rounding:
                found.append(
                    f"the noise depends on the data: one unit moves it by "
                    f"{self.noise_depends_on_data:.3g} standard deviations"
                )
            if not abs(self.repetition) <= DEVIATIONS / math.sqrt(self.numbers):
                found.append(
                    f"the noise of two steps has correlation {self.repetition:.3g}, and is to be "
                    "independent"
                )
        return [*found, *self.noise_faults]

    def __str__(self) -> str:
        rows = [["unit removed", "moves the sum by / C", f"loss times {HOSTILE:g}"]]
        for unit, (distance, hostile) in enumerate(zip(self.distances, self.hostile, strict=True)):
            rows.append(
                [str(unit), *(f"{float(d) / self.clip_norm:.6f}" for d in (distance, hostile))]
            )
        noise = (
            f"noise: standard deviation {self.noise_std:.4g}, stated "
            f"{self.noise_multiplier * self.clip_norm:.4g}; one unit moves it by "
            f"{self.noise_depends_on_data:.1e}; correlation of two steps {self.repetition:.1e}"
        )
        return "\n".join([
            *aligned(rows, [True, True, True]), "",
            *([noise] if self.noise_multiplier else []),
            *(["The network is random in training: its modules were in evaluation."]
              if self.in_evaluation else []),
            *(f"FAIL: {fault}" for fault in self.faults),
            *(["ok: no unit moves the sum by more than C"] if self.ok else []),
            NOT_COVERED,
        ])  # fmt: skip


def record(
    replay: Replay, batch: int, removed: int, noise_multiplier: float, *, in_evaluation: bool,
    is_random: bool, independent: bool, is_gaussian: bool,
) -> RecordedSums:  # fmt: skip
    """Returns what replays tell of units 0, ..., `removed` − 1 of a batch of `batch` units.

    Args:
        in_evaluation, is_random: as of `RecordedSums`.
        independent: the noise of two steps is to be.
        is_gaussian: and that of all numbers, and Gaussian.
    """
    everyone, ones = list(range(batch)), [1.0] * batch
    whole = replay(everyone, ones, 0.0, 1)[0]
    distances, hostile, first = [], [], None
    for unit in range(removed):
        rest = [other for other in everyone if other != unit]
        without = replay(rest, ones[1:], 0.0, 1)[0]
        first = without if first is None else first
        weights = [HOSTILE if other == unit else 1.0 for other in everyone]
        moved = replay(everyone, weights, 0.0, 1)[0]
        distances.append((whole.total - without.total).norm())
        hostile.append((moved.total - without.total).norm())
    noise_std = chance = depends = repetition = noise_rounding = 0.0
    noise_faults: list[str] = []
    if noise_multiplier and first is not None:
        std = noise_multiplier * whole.clip_norm
        replayed = replay(everyone, ones, noise_multiplier, STEPS)
        noises = [step.total - whole.total for step in replayed]
        largest = max(float((noise + whole.total).abs().max()) for noise in noises)
        noise_rounding = 2 * whole.precision * largest / std
        other = replay(everyone[1:], ones[1:], noise_multiplier, 1)[0].total - first.total
        depends = float((other - noises[0]).abs().max()) / std
        square = noises[0].square()
        noise_std = float(square.mean().sqrt())
        # The standard error of a standard deviation, by the delta method.
        error = float(square.std(correction=0)) / math.sqrt(len(square)) / (2 * std)
        chance = DEVIATIONS * error + TOLERANCE * std
        if independent:
            norms = noises[0].norm() * noises[1].norm()
            repetition = float(noises[0] @ noises[1] / norms) if norms else 0.0
        if is_gaussian and noise_rounding < MOST_ROUNDING:
            z = torch.stack(noises if independent else noises[:1]) / std
            tolerance = TOLERANCE + noise_rounding
            noise_faults = faults_of(z, whole.parameters, tolerance)
    rounding = 2 * whole.precision * float(whole.total.norm())
    return RecordedSums(
        whole.clip_norm, torch.stack(distances), torch.stack(hostile), float(noise_multiplier),
        noise_std, chance, rounding, noise_rounding, depends, repetition, len(whole.total),
        in_evaluation, is_random, noise_faults,
    )  # fmt: skip
