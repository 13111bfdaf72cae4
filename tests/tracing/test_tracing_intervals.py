"""Interval algebra against sets of integers: interval (2, 5) is the unit cells {2, 3, 4}."""

import random
from itertools import pairwise

import pytest

from ddp_by_hand.tracing.intervals import difference, intersection, total, union


def cells(intervals):
    return {cell for start, end in intervals for cell in range(start, end)}


def random_intervals(source):
    starts = [source.randrange(40) for _ in range(source.randrange(9))]
    return [(start, start + source.randrange(9)) for start in starts]


@pytest.mark.parametrize("seed", range(60))
def test_algebra_equals_sets_of_cells_sorted_and_with_gaps(seed):
    source = random.Random(seed)
    a, b = random_intervals(source), random_intervals(source)
    assert cells(union(a + b)) == cells(a) | cells(b)
    assert total(a) == len(cells(a))
    for result, expected in [
        (union(a), cells(a)),
        (intersection(a, b), cells(a) & cells(b)),
        (difference(a, b), cells(a) - cells(b)),
    ]:
        assert cells(result) == expected
        assert all(start < end for start, end in result)
        assert all(p[1] < n[0] for p, n in pairwise(result))


def test_touching_intervals_join_empty_ones_vanish_and_reversed_ones_are_refused():
    assert union([(2.0, 3.0), (1.0, 2.0), (5.0, 5.0)]) == [(1.0, 3.0)]
    assert total([]) == 0
    with pytest.raises(ValueError, match="ends before"):
        union([(2.0, 1.0)])
