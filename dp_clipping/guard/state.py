"""Marks what a network holds at one moment, and finds what has changed since.

References and version counters are compared, by loops in C: a step makes two marks, and the host
waits for no GPU. `places` says where values are looked for, `writes` keeps values too, and
`carried` decides what may change.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from dp_clipping.guard.places import MISSING, PLAIN, Change, Named, Place, Places
from dp_clipping.layers.vmap.objects import Objects
from dp_clipping.torch_compat import hooks_so_far, take_hooks_since, version_of

COPY, TENSOR = methodcaller("copy"), attrgetter("tensor")


class State:
    """The places of a network, or of another object, which are searched for again as they change.

    Args:
        root, is_sharded: see `Places`.

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
        self.places = Places(self.root, self.is_sharded)
        self._known = list(map(id, self.places.values()))

    def mark(self) -> "Mark":
        """Returns a mark of all values that are held now, including those in new objects."""
        mark = Mark(self)
        ids = list(map(id, mark.values))
        if mark.sizes != self.places.sizes or (ids != self._known and self._has_new(mark.values)):
            self.walk()
            return Mark(self)
        self._known = ids
        return mark

    def _has_new(self, values: list[Any]) -> bool:
        """Returns whether a dict holds another object than before that may be a place itself."""
        known = set(self._known)
        if any(value is MISSING for value in values):
            return True
        copies = zip(self.places.dicts, self.places.copies(values), strict=True)
        return any(
            id(value) not in known
            and not isinstance(value, PLAIN)
            and (id(place.values), key) not in self.harmless
            for place, copy in copies
            for key, value in copy.items()
        )

    @contextmanager
    def rewound(self, *given: Any, only_given: bool = False) -> Iterator[None]:
        """Restores what the body replaces, and adds it to `changes` for the enclosing `restored`.

        Args:
            given: arguments of a call. What objects in them hold is restored too.
            only_given: nothing else is.
        """
        objects = Objects(*given, values_of=len(given))
        try:
            with nullcontext() if only_given else self._rewound():
                yield
        finally:
            objects.put_back()

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        mark = self.mark()
        try:
            yield
        finally:
            self.changes += mark.replaced()
            mark.put_back()

    def is_harmless(self, change: Change) -> bool:
        return (id(change.place.values), change.key) in self.harmless


class Mark:
    """Records what a `State` held at one moment.

    Attributes:
        sizes: of all dicts.
        values: what they held, see `Places.values`.
    """

    def __init__(self, state: State):
        self.state, self._places = state, state.places
        self.renew()

    def renew(self) -> None:
        """Takes the present for its moment."""
        places = self._places
        self.sizes = list(map(len, places.containers))
        self.values = places.values()
        self._others = list(map(COPY, places.collections))
        self._hooks = hooks_so_far()
        self.tensors = places.tensors
        self._versions = _versions(self.tensors)

    def forget_buffers(self) -> None:
        """Ignores writes to buffers."""
        self.tensors = [named for named in self.tensors if named.place.kind != "buffers"]
        self._versions = _versions(self.tensors)

    def _differing(self) -> Iterator[tuple[Place, Any]]:
        """Returns places of other objects now, and copies of what they held."""
        places = self._places
        if not self._dicts_are_same():
            for place, copy in zip(places.dicts, places.copies(self.values), strict=True):
                now = place.copy()
                if now.keys() != copy.keys() or not all(map(is_, now.values(), copy.values())):
                    yield place, copy
        if not _are_same(self._others, places.collections):
            for place, copy in zip(places.others, self._others, strict=True):
                if not place.is_as(copy):
                    yield place, copy

    def _dicts_are_same(self) -> bool:
        """Returns whether all dicts hold the same objects under the same keys."""
        places = self._places
        if list(map(len, places.containers)) != self.sizes:
            return False
        return all(map(is_, self.values, places.values()))

    def replaced(self) -> list[Change]:
        """Returns the objects that were replaced, removed or added."""
        return [p.change(key) for p, copy in self._differing() for key in p.changed(copy)]

    def changes(self) -> list[Change]:
        """Returns values that were replaced or written to, without those known to be harmless."""
        others_are_same = not self._others or _are_same(self._others, self._places.collections)
        is_same = others_are_same and _versions(self.tensors) == self._versions
        if is_same and self._dicts_are_same():
            return []
        found = self.replaced() + [x.place.change(x.key) for x in self.written()]
        return [change for change in dict.fromkeys(found) if not self.state.is_harmless(change)]

    def written(self) -> list[Named]:
        """Returns tensors that were written to, by their version counters."""
        moved = zip(self.tensors, _versions(self.tensors), self._versions, strict=True)
        return [named for named, new, old in moved if new != old]

    def put_back(self) -> list[tuple[dict, int, Any]]:
        """Puts back everything that was held; returns the hooks that have come since.

        A forward that registers hooks may note in an attribute that it has (Hugging Face's, for
        hidden states), and would register them again and again if that alone were put back.
        """
        for place, copy in list(self._differing()):
            place.put_back(copy)
        root = self.state.root
        if hooks_so_far() == self._hooks or not isinstance(root, nn.Module):
            return []
        return [hook for m in root.modules() for hook in take_hooks_since(m, self._hooks)]


def _are_same(one: Sequence[Collection], other: Sequence[Collection]) -> bool:
    """Returns whether lists and sets hold the same objects in the same order."""
    is_same = list(map(len, one)) == list(map(len, other))
    return is_same and all(map(is_, chain.from_iterable(one), chain.from_iterable(other)))


def _versions(named: list[Named]) -> list[tuple[int, int]]:
    """Returns numbers that each write and each `x.data = ...` change; the host does not wait."""
    tensors = list(map(TENSOR, named))
    return list(zip(map(version_of, tensors), map(Tensor.data_ptr, tensors), strict=True))
