"""The places in which values are held: dicts, lists, deques, sets, and the slots of objects."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from operator import is_
from types import MemberDescriptorType
from typing import Any, NamedTuple

from torch import Tensor

PLAIN = (int, float, complex, str, bytes, type(None))
MISSING = object()
OTHERS = {"torch", "numpy", "dp_clipping", "ddp", "opacus", "builtins", "logging", "enum"}
"""Packages whose objects are not looked into."""


class Change(NamedTuple):
    """A value that has been replaced where it was held.

    Attributes:
        name: the name of the value.
        is_model: it is a parameter, a persistent buffer, or a module with one of them.
    """

    name: str
    is_model: bool
    place: "Place"
    key: Any


class Slots:
    """The attributes that an object has in slots, as a collection."""

    def __init__(self, owner: Any, names: Collection[str]):
        self._owner, self._names = owner, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copy())

    def copy(self) -> list[Any]:
        return [getattr(self._owner, name, MISSING) for name in self._names]

    def put_back(self, copy: list[Any]) -> None:
        for name, value in zip(self._names, copy, strict=True):
            if value is not MISSING:
                object.__setattr__(self._owner, name, value)
            elif hasattr(self._owner, name):
                object.__delattr__(self._owner, name)


@dataclass(eq=False, slots=True)
class Place:
    """A container of values: a dict, a list, a deque, a set, or `Slots`.

    Attributes:
        name: prefix of the names of what it holds.
        values: the container.
        kind: "parameters", "buffers", "modules", "temporary" (names of buffers) or "attributes" of
            a module, or of an object; "": a container in these.
        temporary: names of those buffers that are not in the state dict.
        skipped: keys of a dict that do not count.
    """

    name: str
    values: Any
    kind: str = ""
    temporary: Collection[str] = ()
    skipped: Collection[str] = ()

    def keys(self) -> list[Any]:
        """Returns the keys of a dict that count."""
        return [key for key in self.values if key not in self.skipped]

    def copy(self) -> Any:
        if isinstance(self.values, dict):
            return {key: self.values[key] for key in self.keys()}
        return self.values.copy()

    def put_back(self, copy: Any) -> None:
        values = self.values
        if isinstance(values, dict):  # a class of its own may refuse to be changed
            kind: Any = OrderedDict if isinstance(values, OrderedDict) else dict
            for key in self.keys():
                kind.__delitem__(values, key)
            for key, value in copy.items():
                kind.__setitem__(values, key, value)
        elif isinstance(values, Slots):
            values.put_back(copy)
        elif isinstance(values, list):
            list.__setitem__(values, slice(None), list(copy))
        else:
            values.clear()
            (values.update if isinstance(values, set) else values.extend)(copy)

    def is_as(self, copy: Any) -> bool:
        """Returns whether it still holds the objects of `copy`, in the same order."""
        now: Any = self.values
        if isinstance(now, set):
            return now == copy
        if isinstance(now, dict):
            keys = self.keys()
            now = [*keys, *map(dict.get, repeat(now), keys)]
            copy = [*copy, *copy.values()]
        return len(now) == len(copy) and all(map(is_, now, copy))

    def changed(self, copy: Any) -> list[Any]:
        """Returns the keys whose value was replaced by an unequal one; [None]: the whole."""
        if self.kind == "temporary":
            return []
        if not isinstance(self.values, dict):
            as_many = len(self.values) == len(copy)
            is_same = as_many and all(map(_is_same, self.values, copy))
            return [] if is_same else [None]
        now = self.values
        return [
            key
            for key in dict.fromkeys([*copy, *self.keys()])
            if not _is_same(copy.get(key, MISSING), now.get(key, MISSING))
        ]

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
class Named:
    """A tensor that is held somewhere; `place` is None for one that was given itself."""

    tensor: Tensor
    place: Place | None
    key: Any


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether both are one object, or equal numbers or strings."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and (a == b or a != a))


@lru_cache(maxsize=1024)
def is_opened(kind: Any) -> bool:
    """Returns whether objects of a class may keep values for a network."""
    return kind.__module__.partition(".")[0] not in OTHERS and not issubclass(kind, type)


@lru_cache(maxsize=1024)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Returns the names of the attributes that objects of a class have in slots."""
    own = [vars(one) for one in kind.__mro__ if is_opened(kind) and "__slots__" in vars(one)]
    return tuple(n for one in own for n, x in one.items() if isinstance(x, MemberDescriptorType))
