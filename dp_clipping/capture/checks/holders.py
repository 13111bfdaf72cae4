"""Holds the values of one place: an object's attributes, a list, a variable, names of a module."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MODULE = frozenset(vars(nn.Module()))
# Also what private training adds to a module, and what its criterion sets for a call.
SKIPPED = MODULE | {
    "_private", "forward", "zero_grad", "refuse_wrapper", "__reduce_ex__", "_compiled_call_impl",
    "reduction",
}  # fmt: skip
PLAIN = (int, float, complex, str, bytes, type(None))
MISSING = object()


class Change(NamedTuple):
    """A value that has been replaced where it was held.

    Attributes:
        name: the name of the value.
        is_model: it is a parameter, a persistent buffer, or a module with one of them.
    """

    name: str
    is_model: bool
    holder: "Holder"
    key: Any


@dataclass(eq=False, slots=True)
class Holder:
    """Holds values: a dict (of an object's attributes), a list, a set or a cell.

    Attributes:
        name: prefix of the names of what it holds.
        values: the container.
        kind: "parameters", "buffers", "modules" or "temporary" (names of buffers) of a module; "".
        temporary: names of those buffers that are not in the state dict.
        is_log: its lists may be there for the user to read: only functions or a criterion know it.
    """

    name: str
    values: Any
    kind: str = ""
    temporary: Collection[str] = ()
    is_log: bool = False

    def copy(self) -> Any:
        return self.values.cell_contents if type(self.values) is CellType else self.values.copy()

    def put_back(self, copy: Any) -> None:
        values = self.values
        if type(values) is CellType:
            values.cell_contents = copy
        elif is_array(values):
            values[...] = copy
        elif isinstance(values, dict):
            for key in [k for k in values if k not in copy and k not in SKIPPED]:
                del values[key]
            values.update({k: v for k, v in copy.items() if k not in SKIPPED})
        else:
            values.clear()
            (values.update if isinstance(values, set) else values.extend)(copy)

    def is_as(self, copy: Any) -> bool:
        """Returns whether the holder still holds the objects of `copy`. Not for a dict."""
        values = self.values
        if type(values) is CellType:
            return values.cell_contents is copy
        if isinstance(values, set):  # of a class of its own
            return values == copy
        if is_array(values):
            return bool((values == copy).all())
        return len(values) == len(copy) and all(map(is_, values, copy))

    def changed(self, copy: Any) -> list[Any]:
        """Returns the keys whose value was replaced by an unequal one; [None]: the whole."""
        if self.kind == "temporary":
            return []
        if is_array(self.values):
            return [None]
        if not isinstance(self.values, dict):
            return [] if _same_plain(list(self._all()), list(self._all(copy))) else [None]
        now = self.values
        return [
            key
            for key in dict.fromkeys([*copy, *now])
            if key not in SKIPPED and not _is_same(copy.get(key, MISSING), now.get(key, MISSING))
        ]

    def _all(self, copy: Any = MISSING) -> Any:
        values = self.copy() if copy is MISSING else copy
        return (values,) if type(self.values) is CellType else values

    def value(self, key: Any) -> Any:
        if key is None:
            return self.copy()
        return self.values.get(key, MISSING)

    def change(self, key: Any) -> Change:
        name = self.name.rstrip(".") if key is None else f"{self.name}{key}"
        return Change(name.lstrip("."), self.is_model(key), self, key)

    def is_model(self, key: Any) -> bool:
        """Returns whether a change of this key is one of the model; see `Change`."""
        if self.kind == "buffers":
            return key not in self.temporary
        if self.kind == "modules":
            child = self.values.get(key)
            return child is None or any(True for _ in chain(child.parameters(), child.buffers()))
        return self.kind == "parameters"


@dataclass(eq=False, slots=True)
class Names(Holder):
    """Holds attributes of a class, or variables of a module.

    Attributes:
        names: the names of a module's buffers; None: all of a class.
    """

    names: set[str] | None = None

    def add(self, name: str) -> bool:
        """Holds another variable of a module too; returns whether it was not held."""
        before = self.names or set()
        self.names = {*before, name}
        return name not in before

    def copy(self) -> dict[str, Any]:
        if self.names is None:
            return dict(vars(self.values))
        return {name: self.values[name] for name in self.names if name in self.values}

    def put_back(self, copy: Any) -> None:
        for name in self.changed(copy, is_equal=is_):
            if name in copy:
                self._set(name, copy[name])
            elif self.names is None:
                delattr(self.values, name)
            else:
                del self.values[name]

    def _set(self, name: str, value: Any) -> None:
        if self.names is None:
            setattr(self.values, name, value)
        else:
            self.values[name] = value

    def is_as(self, copy: Any) -> bool:
        now = self.copy()
        return len(now) == len(copy) and all(map(is_, now.values(), copy.values()))

    def changed(self, copy: Any, is_equal: Any = None) -> list[Any]:
        now, is_equal = self.copy(), is_equal or _is_same
        return [
            name
            for name in dict.fromkeys([*copy, *now])
            if not is_dunder(name) and not is_equal(copy.get(name, MISSING), now.get(name, MISSING))
        ]

    def value(self, key: Any) -> Any:
        return self.copy().get(key, MISSING)


def is_dunder(name: str) -> bool:
    """Returns whether a name is like `__doc__`; Python creates some of these on access."""
    return name.startswith("__") and name.endswith("__")


@dataclass(eq=False, slots=True)
class Named:
    """A tensor that is held somewhere."""

    tensor: Tensor
    holder: Holder
    key: Any


def has_memory(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return plain and x.device.type != "meta"


def is_freed(x: Tensor) -> bool:
    """Returns whether a tensor's memory was freed, so that reading it would end the process."""
    return has_memory(x) and bool(x.numel()) and not x.untyped_storage().nbytes()


def is_array(value: Any) -> bool:
    """Returns whether the value is a NumPy array."""
    return type(value).__name__ == "ndarray"


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether both are one object, or equal numbers or strings."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and (a == b or a != a))


def _same_plain(one: list, other: list) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))
