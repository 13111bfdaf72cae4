"""Arithmetic on intervals of time, by a sweep.

An interval is a pair (start, end) of floats, here microseconds. A list of them stands for the set
of instants that at least one covers, so overlapping and repeated intervals count once: that is
what "the GPU computed for 3 ms" means when two streams computed at the same time.

`union` and what follows it are one walk over the sorted edges. At each edge we know whether we are
inside `a`, inside `b` or inside both, and keep the stretch since the previous edge if the answer
pleases:

    a            ████████
    b                ████████
    union        ████████████      inside a or b
    intersection     ████          inside a and b
    difference   ████              inside a and not b
"""

from collections.abc import Callable, Iterable

Interval = tuple[float, float]


def intervals_of(events: Iterable[dict]) -> list[Interval]:
    """Returns the intervals of a trace's events, in order."""
    return sorted((event["start"], event["end"]) for event in events)


def by_name(events: Iterable[dict]) -> dict[str, list[Interval]]:
    """Returns name → intervals of a trace's events, in order."""
    found: dict[str, list[dict]] = {}
    for event in events:
        found.setdefault(event["name"], []).append(event)
    return {name: intervals_of(own) for name, own in found.items()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same instants as sorted intervals that neither overlap nor touch."""
    return _sweep(intervals, (), lambda in_a, in_b: in_a)


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the instants in both."""
    return _sweep(a, b, lambda in_a, in_b: in_a and in_b)


def difference(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the instants in `a` that are not in `b`."""
    return _sweep(a, b, lambda in_a, in_b: in_a and not in_b)


def total(intervals: Iterable[Interval]) -> float:
    """Returns how long the intervals are together; an instant that several cover counts once."""
    return sum(end - start for start, end in union(intervals))


def _sweep(
    a: Iterable[Interval], b: Iterable[Interval], keep: Callable[[bool, bool], bool]
) -> list[Interval]:
    edges = sorted(_edges(a, 0) + _edges(b, 1))
    depth = [0, 0]  # how many intervals of a, and of b, cover the stretch before this edge
    kept: list[Interval] = []
    previous = 0.0
    for time, which, change in edges:
        if time > previous and keep(depth[0] > 0, depth[1] > 0):
            joins = bool(kept) and kept[-1][1] == previous
            start = kept.pop()[0] if joins else previous
            kept.append((start, time))
        depth[which] += change
        previous = time
    return kept


def _edges(intervals: Iterable[Interval], which: int) -> list[tuple[float, int, int]]:
    edges = []
    for start, end in intervals:
        if end < start:
            raise ValueError(f"interval ends before it starts: ({start}, {end})")
        edges += [(start, which, +1), (end, which, -1)]
    return edges
