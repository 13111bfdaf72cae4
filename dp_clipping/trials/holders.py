"""Opens mappings and dataclasses, and makes copies of them that hold other things."""

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any


def held_by(x: Any) -> dict[Any, Any]:
    """Returns what a mapping or a dataclass holds; {} for anything else."""
    if isinstance(x, MutableMapping):
        return dict(x)
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return {}
    names = [one.name for one in dataclasses.fields(x) if hasattr(x, one.name)]
    return {name: getattr(x, name) for name in dict.fromkeys([*names, *getattr(x, "__dict__", ())])}


def holding(x: Any, held: dict[Any, Any]) -> Any:
    """Returns a copy of a mapping or a dataclass that holds other things."""
    if isinstance(x, MutableMapping) and not (isinstance(x, dict) or hasattr(type(x), "__copy__")):
        # A shallow copy would share the dict that it keeps them in.
        made = copy.deepcopy(x, {id(value): value for value in held_by(x).values()})
    else:
        made = copy.copy(x)
    for key, value in held.items():
        if isinstance(made, MutableMapping):
            made[key] = value
        else:
            object.__setattr__(made, key, value)  # it may be frozen
    return made


def lists_in(x: Any) -> dict[Any, Any]:
    """Returns the lists and tuples that a mapping or a dataclass holds, empty."""
    return {k: type(v)() for k, v in held_by(x).items() if type(v) in (list, tuple)}
