"""Checks types of arguments, and refuses wrong ones by name."""

from numbers import Integral, Real
from typing import Any


class WrongType(TypeError, ValueError):
    """An argument of the wrong type; also a ValueError, as every unusable argument is."""


def is_number(x: Any) -> bool:
    """Returns whether it is a real number; True and False are not."""
    return isinstance(x, Real) and not isinstance(x, bool)


def is_count(x: Any) -> bool:
    """Returns whether it is an integer; True and False are not."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def check_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises WrongType unless the value is of this kind."""
    if not isinstance(value, kind):
        raise WrongType(f"{name} is {shown(value)}: give {wanted}")


def check_number(name: str, value: Any, wanted: str) -> None:
    """Raises WrongType unless the value is a real number."""
    if not is_number(value):
        raise WrongType(f"{name} is {shown(value)}: give {wanted}")


def check_count(name: str, value: Any, wanted: str) -> None:
    """Raises WrongType unless the value is an integer."""
    if not is_count(value):
        raise WrongType(f"{name} is {shown(value)}: give {wanted}")


def plain(value: Any) -> Any:
    """Returns a number, numpy's or a fraction too, as Python's own, which checkpoints hold."""
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return value if type(value) in (int, float) else float(value)


def shown(value: Any) -> str:
    """Describes a value of the wrong type, briefly."""
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
