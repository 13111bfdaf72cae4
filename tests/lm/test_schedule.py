import pytest

from ddp_by_hand.lm.schedule import MAX_WARMUP_GRADIENT_NORM, in_warmup, learning_rate


def test_rises_linearly_from_zero_then_stays():
    rates = [learning_rate(step, warmup_steps=4) for step in range(7)]
    assert rates == pytest.approx([0, 0.00025, 0.0005, 0.00075, 0.001, 0.001, 0.001], abs=1e-15)
    assert rates[0] == 0
    assert rates[4] == rates[6] == 1e-3


def test_peak_scales_the_whole_schedule():
    assert learning_rate(1, 2, peak=0.5) == 0.25
    assert learning_rate(2, 2, peak=0.5) == 0.5


def test_no_warmup_gives_the_peak_at_once():
    assert learning_rate(0, warmup_steps=0) == 1e-3
    assert not in_warmup(0, warmup_steps=0)


def test_warmup_ends_where_the_peak_is_reached():
    assert [in_warmup(step, 2) for step in range(4)] == [True, True, False, False]
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
