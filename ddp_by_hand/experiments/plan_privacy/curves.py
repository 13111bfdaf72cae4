"""The law as the paper's main text has it: curves over steps, interpolated between runs.

McKenna et al. 2025, section 3.3: for each model size and noise-batch ratio L = E + A / T^α is
fitted over the steps T; between sizes and ratios the loss is interpolated linearly, in logarithms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_by_hand.experiments.plan_privacy.law import Law, Observation, ranges_of

POWERS = np.geomspace(0.05, 3.0, 120)  # α that are tried


@dataclass(frozen=True)
class Curves(Law):
    """`fits` are (E, A, α) of each size and ratio: [sizes][ratios]; both ascend.

    `deviation` is over losses that were left out: see `left_out`.
    """

    sizes: tuple[float, ...]
    noises: tuple[float, ...]
    fits: tuple[tuple[tuple[float, float, float], ...], ...]
    compared = "on runs left out of its fit"

    def loss(self, parameters: Any, steps: Any, ratio: Any) -> Any:
        """Beyond its sizes and ratios the nearest ones count; beyond its steps the curves do."""
        floor, scale, power = np.moveaxis(np.array(self.fits), -1, 0)
        size, size_part = position(self.sizes, parameters)
        noise, noise_part = position(self.noises, ratio)
        total = 0.0
        for i, of_size in ((size, 1 - size_part), (size + 1, size_part)):
            for j, of_noise in ((noise, 1 - noise_part), (noise + 1, noise_part)):
                own = floor[i, j] + scale[i, j] * np.asarray(steps, float) ** -power[i, j]
                total = total + of_size * of_noise * np.log(own)
        return np.exp(total)


def position(levels: Sequence[float], value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the level below a value, and the part of the way to the next, in logarithms."""
    places = np.log(np.asarray(levels))
    at = np.clip(np.log(np.asarray(value, float)), places[0], places[-1])
    below = np.clip(np.searchsorted(places, at, side="right") - 1, 0, len(places) - 2)
    return below, (at - places[below]) / (places[below + 1] - places[below])


def curve_of(steps: Sequence[float], losses: Sequence[float]) -> tuple[float, float, float]:
    """Returns E and A of 0 or more, and α, with the least squared errors of E + A / T^α."""
    from scipy.optimize import nnls

    found = []
    for power in POWERS:
        columns = np.stack([np.ones(len(losses)), np.array(steps, float) ** -power], axis=1)
        (floor, scale), error = nnls(columns, np.array(losses, float))
        found.append((error, float(floor), float(scale), float(power)))
    return min(found)[1:]


def interpolate(seen: Sequence[Observation], **of_law: Any) -> Curves:
    """Returns the law of runs on a grid of sizes and noise-batch ratios.

    Raises ValueError unless each of two or more sizes was trained at each of two or more ratios,
    with losses at three or more numbers of steps.
    """
    found = _fitted(seen, **of_law, deviation=0.0)
    missed = left_out(seen)
    own = [(found.loss(*one[:3]), one.loss) for one in seen]
    errors = [abs(predicted / loss - 1) for predicted, loss in missed or own]
    return _fitted(seen, **of_law, deviation=float(np.mean(errors)))


def left_out(seen: Sequence[Observation]) -> list[tuple[float, float]]:
    """Returns (predicted, observed) losses, each predicted without its size or its ratio.

    Left out are all runs of one size, or of one ratio, that has others on both sides.
    """
    found = []
    for axis in (0, 2):  # of an observation
        for level in sorted({one[axis] for one in seen})[1:-1]:
            law = _fitted([one for one in seen if one[axis] != level], tokens=0, unit="",
                          source="", deviation=0.0)  # fmt: skip
            own = [one for one in seen if one[axis] == level]
            found += [(float(law.loss(*one[:3])), one.loss) for one in own]
    return found


def _fitted(seen: Sequence[Observation], **of_law: Any) -> Curves:
    sizes = tuple(sorted({one.parameters for one in seen}))
    noises = tuple(sorted({one.ratio for one in seen}))
    runs = {(m, r): [one for one in seen if (one.parameters, one.ratio) == (m, r)]
            for m in sizes for r in noises}  # fmt: skip
    if min(len(sizes), len(noises)) < 2 or min(map(len, runs.values())) < 3:
        raise ValueError(
            f"{len(sizes)} sizes and {len(noises)} noise-batch ratios are no grid of runs with "
            "three losses each: finish "
            "python -m ddp_by_hand.experiments.plan_privacy --calibrate FOLDER"
        )
    fits = tuple(
        tuple(curve_of([one.steps for one in runs[m, r]], [one.loss for one in runs[m, r]])
              for r in noises)
        for m in sizes
    )  # fmt: skip
    return Curves(**(ranges_of(seen) | of_law), sizes=sizes, noises=noises, fits=fits)
