"""Histories are lists of steps, written shorter."""

from collections import Counter
from itertools import chain, pairwise, repeat

from hypothesis import given
from hypothesis import strategies as st

from dp_clipping.accounting import history as histories

ENTRIES = st.tuples(st.sampled_from([0.5, 1.0]), st.sampled_from([0.1, 0.2]), st.integers(1, 4))
HISTORIES = st.lists(ENTRIES, max_size=5)


def single(history: histories.History) -> list[tuple[float, float]]:
    return list(chain.from_iterable(repeat((s, q), steps) for s, q, steps in history))


@given(HISTORIES)
def test_steps_are_counted(history):
    steps = single(history)
    assert histories.count(history) == len(steps)
    assert histories.totals_of(history) == Counter(steps)


@given(HISTORIES, st.integers(0, 25))
def test_the_rest_of_a_history(history, steps):
    assert single(histories.after(history, steps)) == single(history)[steps:]


@given(HISTORIES, HISTORIES)
def test_two_histories_are_joined(first, second):
    whole = histories.joined(first, second)
    assert single(whole) == single(first) + single(second)
    assert all(a[:2] != b[:2] for a, b in pairwise(whole))


@given(HISTORIES, HISTORIES)
def test_the_steps_with_which_two_histories_begin(first, second):
    same, a, b = histories.shared(first, second), single(first), single(second)
    assert a[:same] == b[:same]
    assert same in (len(a), len(b)) or a[same] != b[same]
