"""Quantiles and the paired bootstrap: coverage by simulation, pairing, levels, determinism."""

import numpy as np
import pytest

from ddp_by_hand.measure.statistics import Ratio, ratio, summarize


def _simulate(generator, true, rounds=5, steps=50, shared=0.1, unshared=0.01, step=0.03):
    """Return log-normal step times of a and b whose medians have the ratio `true`.

    `shared` is what a round does to both, `unshared` what it does to each, `step` to a step.
    """
    both = generator.normal(0, shared, (rounds, 1))

    def times(median):
        own = generator.normal(0, unshared, (rounds, 1))
        return median * np.exp(both + own + generator.normal(0, step, (rounds, steps)))

    return times(10 * true), times(10)


def test_summarize():
    summary = summarize([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (summary.median, summary.p10, summary.p90, summary.n) == (6.0, 2.0, 10.0, 11)
    assert summarize([3]).p90 == 3.0


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf")], [[1.0]]])
def test_summarize_refuses(bad):
    with pytest.raises(ValueError, match="samples"):
        summarize(bad)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.slow
def test_interval_covers_the_true_ratio_and_sees_a_clear_difference(paired):
    generator, intervals = np.random.default_rng(1), []
    for run in range(100):
        a, b = _simulate(generator, 1.1)
        if not paired:
            (a, _), (_, b) = (_simulate(generator, 1.1, 5, 50, 0, 0.02) for _ in "ab")
        intervals.append(ratio(a, b, seed=run, paired=paired))
    assert sum(interval.low <= 1.1 <= interval.high for interval in intervals) >= 85
    assert not paired or sum(interval.low > 1.0 for interval in intervals) >= 95
    assert not paired or max(interval.high - interval.low for interval in intervals) < 0.12


def test_interval_sees_that_rounds_differ():
    """Rounds that disagree must widen the interval; resampling steps alone would miss it."""
    a, b = _simulate(np.random.default_rng(2), 1.0, shared=0, unshared=0.05, step=0.001)
    interval = ratio(a, b)
    assert interval.high - interval.low > 0.03


def test_pairing_cancels_what_a_round_does_to_both():
    """Drawing rounds of a and b independently would give an interval wider than 0.3 here."""
    a, b = _simulate(np.random.default_rng(3), 1.1, shared=0.3, unshared=0, step=0.001)
    interval = ratio(a, b)
    assert interval.high - interval.low < 0.01


def test_rounds_of_different_length():
    interval = ratio([[2.0] * 3, [2.0] * 7], [[1.0] * 5, [1.0]])
    assert interval == Ratio(2.0, 2.0, 2.0)
    rare = ratio([[1.0] * 4 + [3.0], [1.0] * 15], [[1.0], [1.0]])  # each step of a round alike
    assert rare == Ratio(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "no rounds"),
        ([[]], [[1.0]], "first argument: expected"),
        ([[1.0]], [[float("nan")]], "second argument: not all"),
        ([[1.0]], [[0.0]], "second argument: a ratio needs positive"),
        ([[1.0], [1.0]], [[1.0]], "2 rounds against 1"),
    ],
)
def test_ratio_refuses(a, b, message):
    with pytest.raises(ValueError, match=message):
        ratio(a, b)


def test_unpaired_rounds_do_not_cancel_and_may_differ_in_number():
    a, b = _simulate(np.random.default_rng(6), 1.1, shared=0.3, unshared=0, step=0.001)
    interval = ratio(a, b, paired=False)
    assert interval.high - interval.low > 0.3
    assert interval.value == ratio(a, b).value
    more = ratio([[2.0] * 3] * 4, [[1.0] * 2] * 2, paired=False)
    assert more == Ratio(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="paired"):
        ratio([[2.0]] * 4, [[1.0]] * 2)
