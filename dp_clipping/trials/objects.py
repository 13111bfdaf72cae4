"""Finds what a network, an object or a call's arguments hold, to compare it and put it back.

    Places      where values are held: it is searched once, and again as that changes
    Snapshot    what was held at one moment: `Objects` of arguments, `Mark` of a network's `State`

It is held in parameters, buffers and attributes of modules, and in them lists, dicts, sets,
dataclasses, caches, and objects with attributes or slots.

What functions hold (closures, default arguments, variables of modules) and attributes of classes
are not looked for: docs/sharp_edges.md says why.

Of a network, references and version counters are compared: a step makes three marks, and the host
waits for no GPU. `values` keeps values too, and `guard.carried` decides what may change.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from operator import attrgetter, is_, methodcaller
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.torch_compat import (
    ADDED,
    hooks_so_far,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
    take_hooks_since,
    version_of,
)
from dp_clipping.trials.places import (
    MISSING,
    PLAIN,
    Change,
    Named,
    Place,
    Slots,
    is_opened,
    slots_of,
)

DEPTH, LENGTH = 8, 4096  # of nested containers; longer ones are data of other kinds
# Attributes of every module, what private training adds, and what a criterion sets for a call.
SKIPPED = frozenset(vars(nn.Module())) | ADDED | {"reduction"}
COPY, TENSOR = methodcaller("copy"), attrgetter("tensor")


class Places:
    """All places of a module, of another object, or of some in a tuple, as they are now.

    Args:
        with_parameters, with_attributes: parameters, and attributes, of modules are places too.

    Attributes:
        root: what they were searched in.
        dicts, others: places that are dicts, and those that are not.
        containers, collections: these dicts and others themselves.
        tensors: in the order in which they are found.
    """

    def __init__(self, root: Any, with_parameters: bool = True, with_attributes: bool = True):
        self.root = root
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
            if slots := slots_of(kind):
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
        self._hooks = hooks_so_far()

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

    def put_back(self) -> list[tuple[dict, int, Any]]:
        """Gives the places what they held; returns the hooks of modules that have come since.

        A forward that registers hooks may note in an attribute that it has (Hugging Face's, for
        hidden states), and would register them again and again if that alone were put back.
        """
        for place, copy in self.differing():
            place.put_back(copy)
        if hooks_so_far() == self._hooks:
            return []
        root = self.places.root
        roots = root if isinstance(root, tuple) else (root,)
        trees = (x.modules() for x in roots if isinstance(x, nn.Module))
        return [hook for m in chain(*trees) for hook in take_hooks_since(m, self._hooks)]


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

    def put_back(self) -> list[tuple[dict, int, Any]]:
        hooks = super().put_back()
        with torch.no_grad():
            for x, version, value in self._values:
                if version_of(x) != version:
                    x.copy_(value)
        return hooks

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
def _is_wrapper(kind: Any) -> bool:
    """Returns whether a class is FSDP1's, which keeps state of its own in attributes."""
    return "FullyShardedDataParallel" in [one.__name__ for one in kind.__mro__]


class State:
    """The places of a network, or of another object, which are searched for again as they change.

    Args:
        root: the network or object.
        is_sharded: it is a sharded network. FSDP puts other tensors in the place of its parameters
            between forward and backward, so they are left out; FSDP1 does so by attributes, which
            are left out too.

    Attributes:
        harmless: what changes and carries nothing: its container, by that and the key.
        changes: of what has been rewound.
    """

    def __init__(self, root: Any, is_sharded: bool = False):
        self.root, self.is_sharded = root, is_sharded
        self.harmless: dict[tuple[int, Any], Any] = {}
        self.changes: list[Change] = []
        self.walk()

    def walk(self) -> None:
        """Searches for the places again."""
        is_covered = self.is_sharded and any(map(_is_wrapper, map(type, self.root.modules())))
        self.places = Places(self.root, not self.is_sharded, not is_covered)
        self.tensors = [
            named
            for named in self.places.tensors
            if named.place is not None
            and (x := named.tensor).grad_fn is None  # others live for one step
            and has_memory(x)
            and not x.is_inference()
        ]
        now = Snapshot(self.places)
        self._sizes, self._known = now.sizes, list(map(id, now.values))

    def mark(self) -> "Mark":
        """Returns a mark of all values that are held now, including those in new objects."""
        mark = Mark(self)
        ids = list(map(id, mark.values))
        if mark.sizes != self._sizes or (ids != self._known and self._has_new(mark)):
            self.walk()
            return Mark(self)
        self._known = ids
        return mark

    def _has_new(self, mark: "Mark") -> bool:
        """Returns whether a dict holds another object than before that may be a place itself."""
        known = set(self._known)
        return any(
            id(value) not in known
            and not isinstance(value, PLAIN)
            and (id(place.values), key) not in self.harmless
            for place, copy in zip(self.places.dicts, self.places.copies(mark.values), strict=True)
            for key, value in copy.items()
        )

    @contextmanager
    def rewound(self, *given: Any, only_given: bool = False) -> Iterator[None]:
        """Restores what the body replaces, and adds it to `changes` for the enclosing `Restored`.

        Args:
            given: arguments of a call. What they and objects in them hold is restored too.
            only_given: nothing else is.
        """
        objects = Objects(*given, with_values=True)
        mark = None if only_given else self.mark()
        try:
            yield
        finally:
            if mark is not None:
                self.changes += mark.replaced()
                mark.put_back()
            objects.put_back()

    def is_harmless(self, change: Change) -> bool:
        return (id(change.place.values), change.key) in self.harmless


class Mark(Snapshot):
    """Records what a `State` held at one moment."""

    def __init__(self, state: State):
        self.state, self.places, self._all = state, state.places, state.tensors
        self.renew()

    def renew(self) -> None:
        super().renew()
        self.tensors = self._all
        self._versions = _versions(self.tensors)

    def forget_buffers(self) -> None:
        """Ignores writes to buffers."""
        self.tensors = [named for named in self.tensors if named.place.kind != "buffers"]
        self._versions = _versions(self.tensors)

    def replaced(self) -> list[Change]:
        """Returns the objects that were replaced, removed or added."""
        return [p.change(key) for p, copy in self.differing() for key in p.changed(copy)]

    def changes(self) -> list[Change]:
        """Returns values that were replaced or written to, without those known to be harmless."""
        if self.is_same() and _versions(self.tensors) == self._versions:
            return []
        found = self.replaced() + [x.place.change(x.key) for x in self.written()]
        return [change for change in dict.fromkeys(found) if not self.state.is_harmless(change)]

    def written(self) -> list[Named]:
        """Returns tensors that were written to, by their version counters."""
        moved = zip(self.tensors, _versions(self.tensors), self._versions, strict=True)
        return [named for named, new, old in moved if new != old]


def _versions(named: list[Named]) -> list[tuple[int, int]]:
    """Returns numbers that each write and each `x.data = ...` change; the host does not wait."""
    tensors = list(map(TENSOR, named))
    return list(zip(map(version_of, tensors), map(Tensor.data_ptr, tensors), strict=True))
