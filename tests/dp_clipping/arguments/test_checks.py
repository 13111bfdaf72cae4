"""Arguments of methods by name: unknown, missing and renamed ones."""

import pytest

from dp_clipping.arguments.checks import checked


class Door:
    @checked("Door(key=1)", old="key")
    def __init__(self, *, key, lock=None):
        self.key, self.lock = key, lock

    @checked("door.turn(times=2)")
    def turn(self, times, *, slowly=False, **more):
        return times, slowly, more


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Door(1), r"^Door: too many positional arguments: Door\(key=1\)$"),
        (lambda: Door(), r"^Door: missing a required .*'key': Door\(key=1\)$"),
        (lambda: Door(key=1, lokc=2), r"^Door: .*'lokc' \(did you mean lock\?\): Door\(key=1\)$"),
        (lambda: Door(key=1, window=2), r"^Door: got an unexpected .*'window': Door\(key=1\)$"),
        (lambda: Door(old=1, key=2), r"^Door: got an unexpected .*'old': Door\(key=1\)$"),
        (lambda: Door(key=1).turn(), r"^turn: missing a required .*'times': door.turn\(times=2\)$"),
        (lambda: Door(key=1).turn(1, 2), "^turn: too many positional arguments"),
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
