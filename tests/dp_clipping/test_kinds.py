"""What counts as a number, and how wrong names of arguments are refused."""

from fractions import Fraction

import numpy as np
import pytest

from dp_clipping.kinds import (
    by_name,
    is_number,
    number,
    plain,
)


@pytest.mark.parametrize("value", [1, 2.5, Fraction(1, 3), np.float32(2), np.int64(3)])
def test_numbers(value):
    assert is_number(value)
    number("one").check("sigma", value)
    assert type(plain(value)) in (int, float)


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
