"""Types of arguments: what counts as a number, and how a wrong one is shown."""

from fractions import Fraction

import numpy as np
import pytest

from dp_clipping.kinds import (
    WrongType,
    check_count,
    check_number,
    check_type,
    is_count,
    is_number,
    plain,
    shown,
)


@pytest.mark.parametrize("value", [1, 2.5, Fraction(1, 3), np.float32(2), np.int64(3)])
def test_numbers(value):
    assert is_number(value)
    check_number("sigma", value, "one")
    assert type(plain(value)) in (int, float)


@pytest.mark.parametrize("value", [True, "1", None, [1], 1j])
def test_what_is_no_number(value):
    assert not is_number(value)
    with pytest.raises(WrongType, match=r"^sigma is .*: give a number above 0$"):
        check_number("sigma", value, "a number above 0")


@pytest.mark.parametrize(
    ("value", "counts"), [(3, True), (np.int32(3), True), (3.0, False), (True, False)]
)
def test_counts(value, counts):
    assert is_count(value) == counts
    if not counts:
        with pytest.raises(WrongType, match="steps is"):
            check_count("steps", value, "an integer")


def test_types():
    check_type("mode", "ghost", str, "a name")
    with pytest.raises(WrongType, match="mode is a list: give a name"):
        check_type("mode", [], str, "a name")


def test_a_wrong_type_is_a_value_error_too():
    assert issubclass(WrongType, ValueError)
    assert issubclass(WrongType, TypeError)


def test_how_values_are_shown():
    assert [shown(x) for x in ("a", 1, None, [1, 2], int)] == [
        *("'a'", "1", "None", "a list", "the class int"),
    ]


def test_lists_become_plain_entry_by_entry():
    assert plain((np.float64(0.5), 2)) == [0.5, 2]
