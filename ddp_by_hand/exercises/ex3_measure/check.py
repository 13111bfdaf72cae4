"""The properties of exercise 3: examples, a count of unit cells, and the course's own sweep."""

import random

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.tracing.intervals import difference, intersection, total, union

WORLD_SIZES = (1,)
WINDOW = (0, 20)


def brute_force(computation, communication, window) -> dict[str, float]:
    """Measures intervals of whole numbers by looking at every cell [t, t + 1] of the window."""

    def covered(intervals):
        start, end = window
        return {t for t in range(start, end) if any(a <= t and t + 1 <= b for a, b in intervals)}

    busy, wire = covered(computation), covered(communication)
    return {
        "computation": len(busy),
        "communication": len(wire),
        "overlapped": len(busy & wire),
        "exposed": len(wire - busy),
        "idle": window[1] - window[0] - len(busy | wire),
    }


def by_sweep(computation, communication, window) -> dict[str, float]:
    busy, wire = intersection(computation, [window]), intersection(communication, [window])
    return {
        "computation": total(busy),
        "communication": total(wire),
        "overlapped": total(intersection(wire, busy)),
        "exposed": total(difference(wire, busy)),
        "idle": total(difference([window], union(busy + wire))),
    }


def expect(rank: Rank, computation, communication, window=WINDOW, reference=brute_force) -> None:
    measured = rank.solution.measure(list(computation), list(communication), window)
    expected = reference(computation, communication, window)
    for name, value in expected.items():
        found = measured.get(name) if isinstance(measured, dict) else None
        if found is None or abs(found - value) > 1e-6:
            raise Wrong(
                f"{name} is {found} and should be {value} for computation {computation}, "
                f"communication {communication}, window {window}"
            )


def apart(rank: Rank) -> None:
    """Communication after computation is all exposed."""
    expect(rank, [(0, 8)], [(8, 14)])


def beside(rank: Rank) -> None:
    """Communication beside computation is overlapped, the rest exposed."""
    expect(rank, [(0, 8), (12, 14)], [(4, 10)])


def twice(rank: Rank) -> None:
    """An instant that two intervals of one list cover counts once."""
    expect(rank, [(0, 8), (4, 10), (5, 6)], [(12, 14), (12, 14)])
    expect(rank, [(0, 8), (4, 10)], [(3, 9), (5, 7)])


def order(rank: Rank) -> None:
    """The lists may come in any order, touch, and be empty."""
    expect(rank, [(12, 14), (0, 4), (4, 8)], [(10, 13), (2, 3)])
    expect(rank, [], [(2, 5)])
    expect(rank, [(2, 5)], [])
    expect(rank, [], [])


def window(rank: Rank) -> None:
    """What lies outside the window does not count."""
    expect(rank, [(0, 8), (30, 40)], [(6, 12)], (2, 10))
    expect(rank, [(0, 8)], [(4, 6)], (10, 12))


def no_change(rank: Rank) -> None:
    """The lists that were passed in are not changed."""
    computation, communication = [(5, 9), (0, 6)], [(8, 12), (3, 4)]
    rank.solution.measure(computation, communication, WINDOW)
    if (computation, communication) != ([(5, 9), (0, 6)], [(8, 12), (3, 4)]):
        raise Wrong("a list has changed: sort a copy, sorted(...) makes one")


def at_random(rank: Rank) -> None:
    """Three hundred random cases agree with a count of unit cells."""
    draw = random.Random(0)
    for _ in range(300):
        computation, communication = (random_intervals(draw, whole=True) for _ in range(2))
        start = draw.randrange(10)
        expect(rank, computation, communication, (start, start + draw.randrange(1, 15)))


def fractions(rank: Rank) -> None:
    """Three hundred cases with fractions agree with ddp_by_hand/tracing/intervals.py."""
    draw = random.Random(1)
    for _ in range(300):
        computation, communication = (random_intervals(draw, whole=False) for _ in range(2))
        expect(rank, computation, communication, (3.5, 17.25), by_sweep)


def random_intervals(draw: random.Random, whole: bool) -> list:
    edges = [[draw.uniform(0, 20) for _ in range(2)] for _ in range(draw.randrange(6))]
    rounded = [sorted(round(e) if whole else round(e, 2) for e in pair) for pair in edges]
    return [(a, b) for a, b in rounded]


PROPERTIES = [apart, beside, twice, order, window, no_change, at_random, fractions]
