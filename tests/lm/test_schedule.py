import pytest

from ddp_by_hand.lm.schedule import MAX_WARMUP_GRADIENT_NORM, in_warmup, learning_rate


@pytest.mark.parametrize(
    ("steps", "warmup", "options", "expected"),
    [
        (range(7), 4, {}, [0, 0.00025, 0.0005, 0.00075, 0.001, 0.001, 0.001]),
        (range(1, 3), 2, {"peak": 0.5}, [0.25, 0.5]),
        (range(1), 0, {}, [0.001]),
    ],
)
def test_the_rate_rises_linearly_from_zero_then_stays(steps, warmup, options, expected):
    rates = [learning_rate(step, warmup, **options) for step in steps]
    assert rates == pytest.approx(expected, abs=1e-15)


def test_warmup_ends_where_the_peak_is_reached():
    assert [in_warmup(step, 2) for step in range(4)] == [True, True, False, False]
    assert not in_warmup(0, warmup_steps=0)
    assert MAX_WARMUP_GRADIENT_NORM == 1.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((-1, 2), "step is -1"), ((0, -2), "warmup_steps is -2"), ((0, 2, -0.1), "peak is -0.1")],
)
def test_negative_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        learning_rate(*arguments)
    if len(arguments) == 2:
        with pytest.raises(ValueError, match=named):
            in_warmup(*arguments)
