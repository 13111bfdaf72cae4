"""Checks types of arguments, and refuses wrong ones by name with what to give."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Rational, Real
from typing import Any


class WrongType(TypeError, ValueError):
    """An argument of the wrong type; also a ValueError, as every unusable argument is."""


def is_number(x: Any) -> bool:
    """Returns whether x is a real number that a float has room for; True and False are not."""
    if isinstance(x, bool) or not isinstance(x, Real):
        return False
    return not isinstance(x, Rational) or _is_within(x, sys.float_info.max)


def is_count(x: Any) -> bool:
    """Returns whether x is an integer of at most 64 bits; True and False are not."""
    return isinstance(x, Integral) and not isinstance(x, bool) and _is_within(x, 2**63 - 1)


def _is_within(x: Any, most: float) -> bool:
    return bool(-most <= x <= most)


@dataclass(frozen=True)
class Argument:
    """Says which values an argument takes.

    Attributes:
        wanted: what to give, as messages say it.
        has_kind: whether a value is of a type that is taken.
        fits: whether a value of that type is in range.
    """

    wanted: str
    has_kind: Callable[[Any], bool]
    fits: Callable[[Any], bool] = lambda _: True

    def check(self, name: str, value: Any) -> None:
        """Raises WrongType or ValueError for a value that is not taken."""
        if not self.has_kind(value):
            raise WrongType(f"{name} is {shown(value)}: give {self.wanted}")
        if not self.fits(value):
            raise ValueError(f"{name} is {value}: give {self.wanted}")


def instance_of(kind: type | tuple[type, ...], wanted: str) -> Argument:
    """Returns an argument that takes what is of this kind."""
    return Argument(wanted, lambda value: isinstance(value, kind))


def number(wanted: str, fits: Callable[[Any], bool] = lambda _: True) -> Argument:
    """Returns an argument that takes numbers, those that fit."""
    return Argument(wanted, is_number, fits)


def positive(wanted: str) -> Argument:
    """Returns an argument that takes finite numbers above 0."""
    return number(wanted, lambda value: 0 < value < math.inf)


def whole(wanted: str, least: int = 1) -> Argument:
    """Returns an argument that takes integers from `least` on."""
    return Argument(wanted, is_count, lambda value: value >= least)


def is_path(x: Any) -> bool:
    """Returns whether x can be the name of a file or folder."""
    try:
        text = os.fspath(x)
        return isinstance(text, str) and b"\0" not in os.fsencode(text) and bool(text)
    except (TypeError, UnicodeError):
        return False


def file(name: str, more: str = "") -> Argument:
    """Returns an argument of this name that takes names of files and folders."""
    wanted = f'the name of a file, a string or pathlib.Path, as {name}="run.pt"'
    return Argument(wanted + more, is_path)


def plain(value: Any) -> Any:
    """Converts a number, such as NumPy's or a fraction, to Python's own type, for checkpoints."""
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return value if type(value) in (int, float) else float(value)


def shown(value: Any) -> str:
    """Describes a value of the wrong type, briefly."""
    if isinstance(value, int) and not _is_within(value, 2**63 - 1):
        return "an integer of more than 64 bits"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
