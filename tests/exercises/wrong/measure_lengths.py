"""Lengths are added up: an instant that two intervals cover counts twice."""

from tests.exercises.solutions import measure as right


def measure(computation, communication, window):
    times = right.measure(computation, communication, window)
    start, end = window
    clipped = [max(0, min(b, end) - max(a, start)) for a, b in computation]
    return times | {"computation": sum(clipped)}
