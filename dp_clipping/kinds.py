"""Checks names and types of arguments, and refuses wrong ones by name with what to give."""

import difflib
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Rational, Real
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable)


class WrongType(TypeError, ValueError):
    """An argument of the wrong type; also a ValueError, as every unusable argument is."""


def is_number(x: Any) -> bool:
    """Returns whether x is a real number that a float has room for; True and False are not."""
    if type(x) is float:
        return True
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


FILE = 'the name of a file, a string or pathlib.Path, as {name}="run.pt"'


def is_path(x: Any) -> bool:
    """Returns whether x can be the name of a file or folder."""
    try:
        text = os.fspath(x)
        return isinstance(text, str) and b"\0" not in os.fsencode(text) and bool(text)
    except (TypeError, UnicodeError):
        return False


def check_path(name: str, value: Any) -> None:
    """Raises WrongType unless the value names a file or a folder."""
    if not is_path(value):
        raise WrongType(f"{name} is {shown(value)}: give {FILE.format(name=name)}")


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


def by_name(call: str, /, **renamed: str) -> Callable[[Function], Function]:
    """Decorates a method: arguments that are unknown, missing or not by name show how to call it.

    Args:
        call: an example, as the message shows it.
        renamed: arguments `old=new`; the old ones warn.

    Raises:
        TypeError: as Python does.
    """

    def decorate(function: Function) -> Function:
        parameters = list(inspect.signature(function).parameters.values())
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        known = [p.name for p in parameters[1:] if p.kind is not p.VAR_KEYWORD]
        needed = [p.name for p in parameters[1:] if p.name in known and p.default is p.empty]

        @functools.wraps(function)
        def checked(*args: Any, **arguments: Any) -> Any:
            for old, new in renamed.items():
                if old not in arguments:
                    continue
                if new in arguments:
                    raise TypeError(f"{old} is the old name of {new}: give {new} alone")
                warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
                arguments[new] = arguments.pop(old)
            if len(args) > most:
                raise TypeError(f"{name} takes arguments by name: {call}")
            for given in arguments:
                if given not in known and not takes_all:
                    nearest = _nearest(given, known)
                    raise TypeError(f"{name} has no argument {given}{nearest}: {call}")
            for wanted in needed[max(0, len(args) - 1) :]:
                if wanted not in arguments:
                    raise TypeError(f"{name}: {wanted} is missing: {call}")
            return function(*args, **arguments)

        return cast(Function, checked)

    return decorate


def _nearest(given: str, known: list[str]) -> str:
    found = difflib.get_close_matches(given, known, n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""
