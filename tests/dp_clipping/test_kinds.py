"""Types of arguments: what counts as a number, and how a wrong one is shown."""

from fractions import Fraction

import numpy as np
import pytest

from dp_clipping.kinds import (
    WrongType,
    by_name,
    instance_of,
    is_count,
    is_number,
    number,
    plain,
    shown,
    whole,
)


@pytest.mark.parametrize("value", [1, 2.5, Fraction(1, 3), np.float32(2), np.int64(3)])
def test_numbers(value):
    assert is_number(value)
    number("one").check("sigma", value)
    assert type(plain(value)) in (int, float)


@pytest.mark.parametrize("value", [True, "1", None, [1], 1j])
def test_what_is_no_number(value):
    assert not is_number(value)
    with pytest.raises(WrongType, match=r"^sigma is .*: give a number above 0$"):
        number("a number above 0").check("sigma", value)


@pytest.mark.parametrize(
    ("value", "counts"), [(3, True), (np.int32(3), True), (3.0, False), (True, False)]
)
def test_counts(value, counts):
    assert is_count(value) == counts
    if not counts:
        with pytest.raises(WrongType, match="steps is"):
            whole("an integer").check("steps", value)


def test_types():
    name = instance_of(str, "a name")
    name.check("mode", "ghost")
    with pytest.raises(WrongType, match="mode is a list: give a name"):
        name.check("mode", [])


def test_a_wrong_type_is_a_value_error_too():
    assert issubclass(WrongType, ValueError)
    assert issubclass(WrongType, TypeError)


def test_how_values_are_shown():
    assert [shown(x) for x in ("a", 1, None, [1, 2], int)] == [
        *("'a'", "1", "None", "a list", "the class int")
    ]


def test_lists_become_plain_entry_by_entry():
    assert plain((np.float64(0.5), 2)) == [0.5, 2]


class Door:
    @by_name("Door(key=1)", old="key")
    def __init__(self, *, key, lock=None):
        self.key, self.lock = key, lock

    @by_name("door.turn(times=2)")
    def turn(self, times, *, slowly=False, **more):
        return times, slowly, more


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Door(1), r"^Door takes arguments by name: Door\(key=1\)$"),
        (lambda: Door(), r"^Door: key is missing: Door\(key=1\)$"),
        (lambda: Door(key=1, lokc=2), r"^Door has no argument lokc \(did you mean lock\?\): Door"),
        (lambda: Door(key=1, window=2), r"^Door has no argument window: Door\(key=1\)$"),
        (lambda: Door(old=1, key=2), "^old is the old name of key: give key alone$"),
        (lambda: Door(key=1).turn(), r"^turn: times is missing: door.turn\(times=2\)$"),
        (lambda: Door(key=1).turn(1, 2), "^turn takes arguments by name"),
    ],
)
def test_arguments_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_what_is_right_passes():
    with pytest.warns(DeprecationWarning, match="old is now key"):
        assert Door(old=3).key == 3
    assert Door(key=1).turn(2, slowly=True, other=4) == (2, True, {"other": 4})
    assert Door(key=1).turn(times=2) == (2, False, {})
