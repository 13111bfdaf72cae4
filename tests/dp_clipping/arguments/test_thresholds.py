"""C as it is set: one number, or one a clipping group, in each step."""

import pytest

from dp_clipping.arguments.thresholds import Thresholds


def test_one_number_serves_all_groups():
    assert Thresholds(2.0, "flat", ["all"]).clip_norms() == [2.0]
    assert Thresholds(2.0, "per_layer", ["a", "b", "c", "d"]).clip_norms() == [1.0] * 4


def test_what_is_set_applies_from_then_on():
    thresholds = Thresholds(2.0, "per_layer", ["a", "b"])
    thresholds.set([1.0, 3.0])
    assert thresholds.clip_norms() == thresholds.max_grad_norm == [1.0, 3.0]


@pytest.mark.parametrize("value", [0.0, float("nan"), [1.0], [1.0, -1.0]])
def test_what_is_refused_is_not_set(value):
    thresholds = Thresholds(2.0, "per_layer", ["a", "b"])
    with pytest.raises(ValueError, match="max_grad_norm"):
        thresholds.set(value)
    assert thresholds.max_grad_norm == 2.0


def test_without_privacy_there_are_no_groups():
    thresholds = Thresholds(2.0, "flat", None)
    thresholds.set(3.0)
    assert (thresholds.max_grad_norm, thresholds.clip_norms()) == (3.0, [])
