"""Tests whether noise is what is stated: independent, of mean 0, Gaussian, and large enough.

All tests are of numbers z = noise / (σC), [steps, numbers], which are to be independent standard
normals. Each statistic has a known distribution then, whatever its size. The tests of one kind
share `LEVEL` / kinds, divided by their number (Bonferroni). So right noise is said to be wrong with
probability at most `LEVEL`.

| kind | statistic | distribution |
| --- | --- | --- |
| size | Σ z² of a parameter, its halves and quarters, of a step, of both | χ², both tails |
| element | Σ z² of one number over the steps | χ², lower tail |
| mean | Σ z of a parameter, of a step, of both | normal |
| shape | how many abs(z) of a parameter, of a step are above a threshold | binomial, both tails |
| steps | z of two steps, of a parameter and of all | see below |
| parameters | z of two parameters at equal offsets, of a step and of all | see below |
| parts | z of neighbouring numbers, rows, halves, thirds and quarters of a parameter | see below |

Of two vectors z and z' of length d, z·z' / ‖z‖ is standard normal. Those of few numbers are found
equal, or of opposite sign, by ‖z ∓ z'‖² / 2, which is χ² with d degrees of freedom.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import scipy  # which imports scipy.stats where it is first used: that takes a second
from torch import Tensor

LEVEL = 1e-4
"""The probability at which right noise is said to be wrong, at most."""

KINDS = ("size", "element", "mean", "shape", "steps", "parameters", "parts")

THRESHOLDS = (0.5, 1.0, 1.75, 2.5)
"""Thresholds of abs(z); how many numbers exceed each tells the shape."""

SMALL = 64
"""Vectors of at most so many numbers are looked at for being equal."""

MOST_OFFSETS = 1 << 14
"""So many numbers of each parameter are compared with those of others."""

MOST_PARAMETERS = 512
"""So many parameters are compared with each other: the first ones."""


@dataclass(frozen=True)
class Parameter:
    """The place of a parameter's numbers: `start` to `stop`, in rows of `row`."""

    name: str
    start: int
    stop: int
    row: int


Result = tuple[float, str]
"""The p-value of a test, and what is wrong if it is small."""


def faults_of(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> list[str]:
    """Returns what is wrong with noise, at most one fault of each kind; empty if nothing is.

    Args:
        z: noise over σC, float64 [steps, numbers].
        tolerance: by how much rounding may change it, relative to σC.
    """
    found = []
    for kind, tests in zip(
        KINDS, (_size, _element, _mean, _shape, _steps, _others, _parts), strict=True
    ):
        results = list(tests(z, parameters, tolerance))
        if not results:
            continue
        count = z.shape[1] if kind == "element" else len(results)
        value, what = min(results)
        if not value * count * len(KINDS) >= LEVEL:
            found.append(f"{what} (p = {value:.1e})")
    return found


def _groups(z: Tensor, parameters: Sequence[Parameter]) -> Iterator[tuple[Tensor, str]]:
    """Yields the numbers of each parameter, of each step, and of each parameter in each step."""
    for parameter in parameters:
        yield z[:, parameter.start : parameter.stop], f"the noise of {parameter.name}"
    if len(z) > 1:
        for step, row in enumerate(z):
            yield row, f"the noise of step {step}"
            for parameter in parameters:
                yield (
                    row[parameter.start : parameter.stop],
                    f"the noise of {parameter.name} in step {step}",
                )


def _size(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    def tests(numbers: Tensor, what: str) -> Iterator[Result]:
        total, count = float(numbers.square().sum()), numbers.numel()
        low = float(scipy.stats.chi2.cdf(total / (1 - tolerance) ** 2, count))
        high = float(scipy.stats.chi2.sf(total / (1 + tolerance) ** 2, count))
        yield low, f"{what} has {math.sqrt(total / count):.3g} of the stated standard deviation"
        yield high, f"{what} has {math.sqrt(total / count):.3g} of the stated standard deviation"

    for numbers, what in _groups(z, parameters):
        yield from tests(numbers, what)
    for parameter in parameters:
        own = z[:, parameter.start : parameter.stop]
        for parts in (2, 4):
            if own.shape[1] >= parts:
                for part, numbers in enumerate(own.tensor_split(parts, 1)):
                    yield from tests(
                        numbers, f"the noise of part {part + 1} of {parts} of {parameter.name}"
                    )


def _element(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    if len(z) == 1:
        return
    totals = z.square().sum(0)
    for parameter in parameters:
        own = totals[parameter.start : parameter.stop]
        place = int(own.argmin())
        value = float(
            scipy.stats.chi2.cdf(max(0.0, float(own[place].sqrt()) - tolerance) ** 2, len(z))
        )
        yield value, f"number {place} of {parameter.name} has hardly any noise"


def _mean(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    for numbers, what in _groups(z, parameters):
        mean, count = float(numbers.mean()), numbers.numel()
        beyond = max(0.0, abs(mean) - tolerance) * math.sqrt(count)
        yield (
            2 * float(scipy.stats.norm.sf(beyond)),
            f"{what} has mean {mean:.3g} standard deviations",
        )


def _shape(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    for numbers, what in _groups(z, parameters):
        count = numbers.numel()
        for threshold in THRESHOLDS:
            above = int((numbers.abs() > threshold).sum())
            most = 2 * float(scipy.stats.norm.sf(threshold * (1 - tolerance) - tolerance))
            least = 2 * float(scipy.stats.norm.sf(threshold * (1 + tolerance) + tolerance))
            value = min(
                float(scipy.stats.binom.cdf(above, count, least)),
                float(scipy.stats.binom.sf(above - 1, count, most)),
            )
            yield (
                min(1.0, 2 * value),
                (
                    f"{what} is not Gaussian: {above / count:.1%} are beyond {threshold} standard "
                    f"deviations, and {2 * float(scipy.stats.norm.sf(threshold)):.1%} would be"
                ),
            )


def _pair(one: Tensor, other: Tensor, what: str, tolerance: float) -> Iterator[Result]:
    """Yields tests of whether two vectors are independent."""
    length = float(one.norm())
    if not length:
        return
    product = float((one * other).sum())
    share = product / (length * float(other.norm()) or 1.0)
    yield (
        2 * float(scipy.stats.norm.sf(abs(product) / length)),
        f"{what} have correlation {share:.3g}",
    )
    if one.numel() <= SMALL:
        for sign, how in ((1, "equal"), (-1, "equal but for the sign")):
            apart = float((one - sign * other).norm()) / math.sqrt(2)
            value = float(
                scipy.stats.chi2.cdf(
                    max(0.0, apart - tolerance * math.sqrt(one.numel())) ** 2, one.numel()
                )
            )
            yield value, f"{what} are {how}"


def _steps(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    for later in range(len(z)):
        for earlier in range(later):
            steps = f"in steps {earlier} and {later}"
            yield from _pair(z[earlier], z[later], f"the noises {steps}", tolerance)
            for p in parameters:
                own = slice(p.start, p.stop)
                what = f"the noises of {p.name} {steps}"
                yield from _pair(z[earlier, own], z[later, own], what, tolerance)


def _others(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    for place, p in enumerate(parameters[:MOST_PARAMETERS]):
        for q in parameters[:place]:
            size = min(p.stop - p.start, q.stop - q.start, MOST_OFFSETS)
            one, other = z[:, q.start : q.start + size], z[:, p.start : p.start + size]
            what = f"the noises of {q.name} and {p.name} at equal offsets"
            yield from _pair(one, other, what, tolerance)
            if len(z) > 1:
                yield from _pair(one[:-1], other[1:], f"{what}, a step later,", tolerance)
                yield from _pair(one[1:], other[:-1], f"{what}, a step before,", tolerance)


def _parts(z: Tensor, parameters: Sequence[Parameter], tolerance: float) -> Iterator[Result]:
    for p in parameters:
        own, size = z[:, p.start : p.stop], p.stop - p.start
        lengths = {1, p.row, -(-size // 2), size // 2, -(-size // 3), size // 3, -(-size // 4)}
        for length in sorted(lengths):
            pairs = size // (2 * length) if length else 0
            if not pairs:
                continue
            both = own[:, : 2 * length * pairs].unflatten(1, (pairs, 2, length))
            what = f"the noises of neighbouring parts of {p.name}, of {length} numbers each,"
            yield from _pair(both[:, :, 0], both[:, :, 1], what, tolerance)
