"""Finds what a network, an object or a call's arguments hold, to compare it and put it back.

It is held in parameters, buffers and attributes of modules, and in them lists, dicts, sets,
dataclasses, caches, and objects with attributes or slots.

What functions hold (closures, default arguments, variables of modules) and attributes of classes
are not looked for: docs/sharp_edges.md says why.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from operator import is_, methodcaller
from types import MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dp_clipping.torch_compat import (
    ADDED,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
    version_of,
)

DEPTH, LENGTH = 8, 4096  # of nested containers; longer ones are data of other kinds
OTHERS = {"torch", "numpy", "dp_clipping", "ddp", "opacus", "builtins", "logging", "enum"}
"""Packages whose objects are not looked into."""
# Attributes of every module, what private training adds, and what a criterion sets for a call.
SKIPPED = frozenset(vars(nn.Module())) | ADDED | {"reduction"}
PLAIN = (int, float, complex, str, bytes, type(None))
MISSING = object()
COPY = methodcaller("copy")


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


class Places:
    """All places of a module, of another object, or of some in a tuple, as they are now.

    Args:
        with_parameters, with_attributes: parameters, and attributes, of modules are places too.

    Attributes:
        dicts, others: places that are dicts, and those that are not.
        containers, collections: these dicts and others themselves.
        tensors: in the order in which they are found.
    """

    def __init__(self, root: Any, with_parameters: bool = True, with_attributes: bool = True):
        self.dicts, self.others, self.tensors = list[Place](), list[Place](), list[Named]()
        self._seen: dict[int, Any] = {}
        self._with_parameters, self._with_attributes = with_parameters, with_attributes
        self._visit(root, "", None, None, 0)
        self._seen.clear()
        self.containers = [place.values for place in self.dicts]
        self.collections = [place.values for place in self.others]
        keys = [place.keys() for place in self.dicts]
        self._counts, self._keys = list(map(len, keys)), list(chain.from_iterable(keys))
        self._owners = list(chain.from_iterable(map(repeat, self.containers, self._counts)))

    def values(self) -> list[Any]:
        """Returns what all dicts hold under the keys that they had, without a loop in Python."""
        return list(map(dict.get, self._owners, self._keys, repeat(MISSING)))

    def copies(self, values: list[Any]) -> list[dict[Any, Any]]:
        """Returns these values as one dict for each of `dicts`."""
        held = zip(self._keys, values, strict=True)
        parts = map(islice, repeat(held), self._counts)
        return [{key: x for key, x in part if x is not MISSING} for part in parts]

    def _visit(self, value: Any, name: str, place: Place | None, key: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or depth > DEPTH or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors.append(Named(value, place, key))
        elif isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, tuple):
            for n, part in enumerate(value):
                self._visit(part, f"{name}[{n}]", place, key, depth + 1)
        elif isinstance(value, partial):
            self._visit((value.func, value.args, value.keywords), name, place, key, depth)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, name, place, key, depth)
        else:
            if isinstance(value, dict | list | deque | set):
                self._hold(Place(f"{name}.", value), depth)
            kind: Any = type(value)
            if is_opened(kind) and hasattr(value, "__dict__"):
                attributes = Place(f"{name}.", vars(value), "attributes", skipped=SKIPPED)
                self._hold(attributes, depth)
            if slots := _slots_of(kind):
                self._hold(Place(f"{name}.", Slots(value, slots)), depth)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        kind: Any = type(module)
        parameters = own_parameters(module)
        if self._with_parameters:
            self._hold(Place(prefix, parameters, "parameters"), 0)
        temporary = non_persistent_buffers(module)
        self._hold(Place(prefix, own_buffers(module), "buffers", temporary), 0)
        self._hold(Place(prefix, own_modules(module), "modules"), 0)
        self._hold(Place(prefix, temporary, "temporary"), 0)
        if self._with_attributes and not _is_wrapper(kind):
            skipped = SKIPPED.union(parameters)  # FSDP1 lays plain tensors over them
            self._hold(Place(prefix, vars(module), "attributes", skipped=skipped), 0)

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
        for key, value in list(values.items()):
            if isinstance(value, PLAIN) or key in place.skipped:
                continue
            is_long = isinstance(key, Tensor | nn.Module)  # and slow to print
            shown = type(key).__name__ if is_long else key
            self._visit(value, f"{place.name}{shown}", place, key, depth + 1)


class Snapshot:
    """Holds what places held at one moment. Each step makes some, and compares them.

    Attributes:
        values: what the dicts held; see `Places.values`.
        sizes: how many keys each of them had.
    """

    def __init__(self, places: Places):
        self.places = places
        self.renew()

    def renew(self) -> None:
        """Takes the present for its moment."""
        places = self.places
        self.sizes, self.values = list(map(len, places.containers)), places.values()
        self._others = list(map(COPY, places.collections))

    def pairs(self) -> list[tuple[Place, Any]]:
        """Returns each place, and a copy of what it held."""
        held = [*self.places.copies(self.values), *self._others]
        return list(zip([*self.places.dicts, *self.places.others], held, strict=True))

    def is_same(self) -> bool:
        """Returns whether the places hold the same objects now."""
        places = self.places
        sizes = list(map(len, chain(places.containers, places.collections)))
        held = chain(places.values(), *places.collections)
        return sizes == [*self.sizes, *map(len, self._others)] and all(
            map(is_, held, chain(self.values, *self._others))
        )

    def differing(self) -> list[tuple[Place, Any]]:
        """Returns those that hold other objects now."""
        if self.is_same():
            return []
        return [(place, copy) for place, copy in self.pairs() if not place.is_as(copy)]

    def put_back(self) -> Any:
        """Gives the places what they held."""
        for place, copy in self.differing():
            place.put_back(copy)


class Objects(Snapshot):
    """A snapshot of what is held by the objects that are reachable from some roots.

    Parameters of modules are left out.

    Args:
        with_values: tensors keep their values, too.

    Attributes:
        tensors: those that are held.
    """

    def __init__(self, *roots: Any, with_values: bool = False):
        super().__init__(Places(roots, with_parameters=False))
        self.tensors = [named.tensor for named in self.places.tensors]
        kept = [x for x in self.tensors if with_values and not x.is_inference()]
        self._values = [(x, version_of(x), x.detach().clone()) for x in kept]

    def put_back(self) -> None:
        super().put_back()
        with torch.no_grad():
            for x, version, value in self._values:
                if version_of(x) != version:
                    x.copy_(value)

    def show(self, tensors: dict[int, Tensor]) -> None:
        """Puts other tensors in the place of those with these ids."""
        for place, copy in Snapshot(self.places).pairs():
            if isinstance(copy, dict):
                shown: Any = {key: exchanged(value, tensors) for key, value in copy.items()}
            else:
                shown = [exchanged(value, tensors) for value in copy]
            if not place.is_as(shown):
                place.put_back(shown)

    def apart(self, args: tuple, own: Iterable[Tensor]) -> tuple:
        """Lays copies without a graph over all tensors but parameters; returns `args` with them."""
        stay = set(map(id, own))
        kept = [x for x in self.tensors if id(x) not in stay and not is_freed(x)]
        copies = {id(x): x.detach().requires_grad_(x.requires_grad).clone() for x in kept}
        self.show(copies)
        return exchanged(args, copies)

    def left_since(self, before: "Objects") -> list[Tensor]:
        """Returns the tensors that were not in these objects before."""
        known = set(map(id, before.tensors))
        return [x for x in self.tensors if id(x) not in known]


def exchanged(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Returns a value with others in the place of tensors with these ids, in tuples too."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if not isinstance(value, tuple):
        return value
    parts = [exchanged(part, tensors) for part in value]
    if all(map(is_, parts, value)):
        return value
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def has_memory(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return plain and x.device.type != "meta"


def is_freed(x: Tensor) -> bool:
    """Returns whether a tensor's memory was freed, so that reading it would end the process."""
    return has_memory(x) and bool(x.numel()) and not x.untyped_storage().nbytes()


@lru_cache(maxsize=1024)
def is_opened(kind: Any) -> bool:
    """Returns whether objects of a class may keep values for a network."""
    return kind.__module__.partition(".")[0] not in OTHERS and not issubclass(kind, type)


@lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Returns the names of the attributes that objects of a class have in slots."""
    own = [vars(one) for one in kind.__mro__ if is_opened(kind) and "__slots__" in vars(one)]
    return tuple(n for one in own for n, x in one.items() if isinstance(x, MemberDescriptorType))


@lru_cache(maxsize=1024)
def _is_wrapper(kind: Any) -> bool:
    """Returns whether a class is FSDP1's, which keeps state of its own in attributes."""
    return "FullyShardedDataParallel" in [one.__name__ for one in kind.__mro__]


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether both are one object, or equal numbers or strings."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and (a == b or a != a))
