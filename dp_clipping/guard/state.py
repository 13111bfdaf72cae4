"""Marks what a network holds at one moment, and finds what has changed since.

References and version counters are compared: a step makes two marks, and the host waits for no GPU.
`trials.objects` says where values are looked for, `trials.values` keeps values too, and `carried`
decides what may change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from dp_clipping.distributed.dtensor import is_fsdp1
from dp_clipping.torch_compat import hooks_so_far, take_hooks_since, version_of
from dp_clipping.trials.objects import PLAIN, Change, Named, Objects, Places, Snapshot, has_memory

TENSOR = attrgetter("tensor")


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
        is_covered = self.is_sharded and any(is_fsdp1(m) for m in self.root.modules())
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
        self._hooks = hooks_so_far()
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

    def put_back(self) -> list[tuple[dict, int, Any]]:
        """Puts back everything that was held; returns the hooks that have come since.

        A forward that registers hooks may note in an attribute that it has (Hugging Face's, for
        hidden states), and would register them again and again if that alone were put back.
        """
        super().put_back()
        root = self.state.root
        if hooks_so_far() == self._hooks or not isinstance(root, nn.Module):
            return []
        return [hook for m in root.modules() for hook in take_hooks_since(m, self._hooks)]


def _versions(named: list[Named]) -> list[tuple[int, int]]:
    """Returns numbers that each write and each `x.data = ...` change; the host does not wait."""
    tensors = list(map(TENSOR, named))
    return list(zip(map(version_of, tensors), map(Tensor.data_ptr, tensors), strict=True))
