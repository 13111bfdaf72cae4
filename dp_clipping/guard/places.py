"""The containers in which a network, or another object, holds values: parameters, buffers,
attributes of modules, and the lists, dicts, sets and objects in these attributes.

What functions hold (closures, default arguments, variables of modules) and attributes of classes
are not looked for: docs/sharp_edges.md says why.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import is_
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dp_clipping.distributed.dtensor import is_fsdp1
from dp_clipping.torch_compat import (
    ADDED,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)

DEPTH, LENGTH = 5, 4096  # of nested containers; longer ones are data of other kinds
OTHERS = {"torch", "dp_clipping", "ddp", "opacus", "builtins", "collections", "logging", "enum"}
"""Packages whose objects are not looked into."""
# Attributes of every module, what private training adds, and what a criterion sets for a call.
SKIPPED = frozenset(vars(nn.Module())) | ADDED | {"reduction"}
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
    place: "Place"
    key: Any


@dataclass(eq=False, slots=True)
class Place:
    """A container of values: a dict, a list, a deque or a set.

    Attributes:
        name: prefix of the names of what it holds.
        values: the container.
        kind: "parameters", "buffers", "modules", "temporary" (names of buffers) or "attributes" of
            a module, or of an object; "": a container in these.
        temporary: names of those buffers that are not in the state dict.
    """

    name: str
    values: Any
    kind: str = ""
    temporary: Collection[str] = ()

    def keys(self) -> list[Any]:
        """Returns the keys of a dict that count."""
        if self.kind == "attributes":
            return [key for key in self.values if key not in SKIPPED]
        return list(self.values)

    def copy(self) -> Any:
        if isinstance(self.values, dict):
            return {key: self.values[key] for key in self.keys()}
        return self.values.copy()

    def put_back(self, copy: Any) -> None:
        values = self.values
        if isinstance(values, dict):
            for key in [key for key in self.keys() if key not in copy]:
                del values[key]
            values.update(copy)
        else:
            values.clear()
            (values.update if isinstance(values, set) else values.extend)(copy)

    def is_as(self, copy: Any) -> bool:
        """Returns whether a list or set still holds the objects of `copy`."""
        if isinstance(self.values, set):
            return self.values == copy
        return len(self.values) == len(copy) and all(map(is_, self.values, copy))

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

    def value(self, key: Any) -> Any:
        return self.copy() if key is None else self.values.get(key, MISSING)

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
    """A tensor that is held somewhere."""

    tensor: Tensor
    place: Place
    key: Any


class Places:
    """All places of a module, or of another object, as they are now.

    Args:
        root: the module or object.
        is_sharded: it is a sharded network. FSDP puts other tensors in the place of its parameters
            between forward and backward, so they are left out; FSDP1 does so by attributes, which
            are left out too.

    Attributes:
        dicts, others: places that are dicts, and those that are not.
        containers, sizes: the dicts themselves, and how much they hold.
        collections: the others themselves.
        tensors: those that have memory of their own.
    """

    def __init__(self, root: Any, is_sharded: bool = False):
        self.dicts: list[Place] = []
        self.others: list[Place] = []
        self.tensors: list[Named] = []
        self._seen: dict[int, Any] = {}
        self._is_sharded = is_sharded
        self._is_covered = is_sharded and any(is_fsdp1(m) for m in root.modules())
        self._visit(root, "", None, None, 0)
        self._seen.clear()
        self.containers = [place.values for place in self.dicts]
        self.sizes = list(map(len, self.containers))
        self.collections = [place.values for place in self.others]
        each = [place.keys() for place in self.dicts]
        self._counts = list(map(len, each))
        self._keys = list(chain.from_iterable(each))
        self._owners = list(chain.from_iterable(map(repeat, self.containers, self._counts)))

    def values(self) -> list[Any]:
        """Returns what all dicts hold under the keys that they had, without a loop in Python."""
        return list(map(dict.get, self._owners, self._keys, repeat(MISSING)))

    def copies(self, values: list[Any]) -> list[dict[Any, Any]]:
        """Returns these values as one dict for each of `dicts`."""
        pairs = iter(zip(self._keys, values, strict=True))
        return [
            {key: value for key, value in (next(pairs) for _ in range(n)) if value is not MISSING}
            for n in self._counts
        ]

    def _visit(self, value: Any, name: str, place: Place | None, key: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or depth > DEPTH or id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            if value.grad_fn is None and place is not None:  # others live for one step
                self._seen[id(value)] = value
                if has_memory(value) and not value.is_inference():
                    self.tensors.append(Named(value, place, key))
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, dict | list | deque | set):
            self._hold(Place(f"{name}.", value), depth)
        elif isinstance(value, tuple):
            for n, part in enumerate(value):
                self._visit(part, f"{name}[{n}]", place, key, depth + 1)
        elif isinstance(value, partial):
            self._visit((value.func, value.args, value.keywords), name, place, key, depth)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, name, place, key, depth)
        elif has_attributes(value):
            self._hold(Place(f"{name}.", vars(value), "attributes"), depth)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        if not self._is_sharded:
            self._hold(Place(prefix, own_parameters(module), "parameters"), 0)
        temporary = non_persistent_buffers(module)
        self._hold(Place(prefix, own_buffers(module), "buffers", temporary), 0)
        self._hold(Place(prefix, own_modules(module), "modules"), 0)
        self._hold(Place(prefix, temporary, "temporary"), 0)
        if not self._is_covered:
            self._hold(Place(prefix, vars(module), "attributes"), 0)

    def _hold(self, place: Place, depth: int) -> None:
        values = place.values
        if len(values) > LENGTH:
            return
        if not isinstance(values, dict):
            self.others.append(place)
            for value in values.copy():
                self._visit(value, place.name.rstrip("."), place, None, depth + 1)
            return
        self.dicts.append(place)
        is_of_object = place.kind == "attributes"
        for key, value in list(values.items()):
            if isinstance(value, PLAIN) or (is_of_object and key in SKIPPED):
                continue
            is_long = isinstance(key, Tensor | nn.Module)  # and slow to print
            shown = type(key).__name__ if is_long else key
            self._visit(value, f"{place.name}{shown}", place, key, depth + 1)


def has_attributes(value: Any) -> bool:
    """Returns whether the value's class may keep values for a network in attributes."""
    package = type(value).__module__.partition(".")[0]
    return package not in OTHERS and not isinstance(value, type) and hasattr(value, "__dict__")


def has_memory(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return plain and x.device.type != "meta"


def is_freed(x: Tensor) -> bool:
    """Returns whether a tensor's memory was freed, so that reading it would end the process."""
    return has_memory(x) and bool(x.numel()) and not x.untyped_storage().nbytes()


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether both are one object, or equal numbers or strings."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and (a == b or a != a))
