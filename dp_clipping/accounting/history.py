"""Adds, cuts and compares histories of steps, in the form of Opacus's accountants."""

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

History = list[tuple[float, float, int]]
"""(noise multiplier, sample rate, number of steps), in the order in which they were counted."""

HistoryPart = tuple[int, History]
"""Steps of one key: the number of the first one, and from there on all."""

Parts = dict[str, HistoryPart]
"""By the key's fingerprint, which is public."""


def count(history: History) -> int:
    """Returns the number of steps in a history, over all entries."""
    return sum([steps for _, _, steps in history])


def after(history: History, steps: int) -> History:
    """Returns the part of a history that follows its first `steps` steps."""
    rest = []
    for sigma, rate, number in history:
        left = number - min(number, steps)
        steps -= number - left
        if left:
            rest.append((sigma, rate, left))
    return rest


def shared(first: History, second: History) -> int:
    """Returns the number of steps with which both histories begin alike."""
    both = zip(_single(first), _single(second), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def joined(first: History, second: History) -> History:
    """Concatenates two histories, and merges equal neighbouring entries."""
    whole: History = []
    for sigma, rate, steps in [*first, *second]:
        if whole and whole[-1][:2] == (sigma, rate):
            steps += whole.pop()[2]
        whole.append((sigma, rate, steps))
    return whole


def totals_of(history: History) -> Counter[tuple[float, float]]:
    """Returns steps by noise multiplier and sample rate."""
    totals: Counter[tuple[float, float]] = Counter()
    for sigma, rate, steps in history:
        totals[sigma, rate] += steps
    return totals


def _single(history: History) -> Iterator[tuple[float, float]]:
    for sigma, rate, steps in history:
        for _ in range(steps):
            yield sigma, rate
