"""Where a network holds values from one batch to the next, and what of it has changed.

`State` knows the places: parameters, buffers, attributes of modules, what their lists, dicts and
objects hold, variables of hooks. A `Mark` is what they held at one moment: references and version
counters, which the host reads without waiting for a GPU. `Writes` keeps values too, each from just
before the first operator that writes to it. `carried` says what may change.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, groupby
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dp_clipping.distributed.dtensor import is_fsdp1
from dp_clipping.torch_compat import (
    TorchDispatchMode,
    hooks_of,
    hooks_so_far,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
    schema_of,
    take_hooks_since,
    version_of,
)

MODULE = frozenset(vars(nn.Module()))
# Also what captures a module, and what a private criterion sets for a call.
SKIPPED = MODULE | {"_private", "forward", "reduction"}
OTHERS = {"torch", "dp_clipping", "ddp", "opacus", "builtins", "collections", "logging", "enum"}
"""Packages whose objects are not looked into."""
PLAIN = (int, float, complex, str, bytes, type(None))
DEPTH, LENGTH = 5, 4096  # of nested containers; longer ones are data of other kinds
MISSING = object()


class Change(NamedTuple):
    """Something that is held otherwise now.

    Attributes:
        name: of it.
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
        owner: the module whose parameters, buffers or modules these are; else None.
        is_log: a list of a hook's or of a criterion's, which may be there for the user to read.
    """

    name: str
    values: Any
    owner: nn.Module | None = None
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
        """Returns whether it holds the same objects; of what is no dict."""
        values = self.values
        if type(values) is CellType:
            return values.cell_contents is copy
        if isinstance(values, set):
            return values == copy
        if is_array(values):
            return bool((values == copy).all())
        return len(values) == len(copy) and all(map(is_, values, copy))

    def changed(self, copy: Any) -> list[Any]:
        """Returns keys of what is another object, and no equal plain value; None: all of it."""
        if isinstance(self.values, set) and self.owner is not None:
            return []  # names of non-persistent buffers
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
        """Returns what `Change` says."""
        owner = self.owner
        if owner is None:
            return False
        if self.values is own_parameters(owner):
            return True
        if self.values is own_buffers(owner):
            return key not in non_persistent_buffers(owner)
        child = self.values.get(key)
        return child is None or any(True for _ in chain(child.parameters(), child.buffers()))


@dataclass(eq=False, slots=True)
class Named:
    """A tensor that is held somewhere."""

    tensor: Tensor
    holder: Holder
    key: Any

    @property
    def is_buffer(self) -> bool:
        owner = self.holder.owner
        return owner is not None and self.holder.values is own_buffers(owner)


class State:
    """Where a network, or another callable object, holds values.

    Args:
        root: a module, or any object.
        is_sharded: it is a sharded network. FSDP puts other tensors in the place of its parameters
            between forward and backward, so they are left out; FSDP1 does so by attributes, which
            are left out too.
    """

    def __init__(self, root: Any, is_sharded: bool = False):
        self.root, self.is_sharded = root, is_sharded
        self.harmless: set[tuple[int, Any]] = set()  # changes, and does not carry data
        self.changes: list[Change] = []  # of what has been rewound
        self.watch: Writes | None = None  # of the next body that is rewound
        self.walk()

    def walk(self) -> None:
        """Look for the places again."""
        self.dicts: list[Holder] = []  # those of dicts
        self.others: list[Holder] = []
        self.tensors: list[Named] = []
        self._seen: dict[int, Any] = {}
        self._is_covered = False
        self._is_for_the_user = not isinstance(self.root, nn.Module)
        if self.is_sharded:
            self._is_covered = any(is_fsdp1(m) for m in self.root.modules())
        self._hooks: list[tuple[str, Any]] = []
        self._visit(self.root, "", None, None, 0)
        self._is_for_the_user = True  # what only hooks know
        for name, hook in self._hooks:
            self._visit(hook, name, None, None, 1)
        self._seen.clear()
        self._ids = self._all_ids()

    def _visit(self, value: Any, name: str, holder: Holder | None, key: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or depth > DEPTH:
            return
        if isinstance(value, Tensor):
            is_kept = value.grad_fn is None  # others live for one step
            if is_kept and holder is not None and id(value) not in self._seen:
                self._seen[id(value)] = value
                if _has_memory(value) and not value.is_inference():
                    self.tensors.append(Named(value, holder, key))
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, dict | list | deque | set | CellType):
            is_log = self._is_for_the_user and isinstance(value, list | deque)
            self._hold(Holder(f"{name}.", value, is_log=is_log), depth)
        elif is_array(value):
            if 0 < value.size <= LENGTH and value.ndim:
                self.others.append(Holder(f"{name}.", value))
        elif isinstance(value, tuple):
            for n, part in enumerate(value):
                self._visit(part, f"{name}[{n}]", holder, key, depth + 1)
        elif isinstance(value, partial):
            self._visit((value.func, value.args, value.keywords), name, holder, key, depth)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, name, holder, key, depth)
        elif isinstance(value, FunctionType):
            variables = value.__code__.co_freevars
            for variable, cell in zip(variables, value.__closure__ or (), strict=True):
                self._hold(Holder(f"{name}.{variable}", cell), depth)
            self._visit((value.__defaults__, value.__kwdefaults__), name, None, None, depth)
        elif has_attributes(value):
            self._hold(Holder(f"{name}.", vars(value)), depth)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        if not self.is_sharded:
            self._hold(Holder(prefix, own_parameters(module), module), 0)
        self._hold(Holder(prefix, own_buffers(module), module), 0)
        self._hold(Holder(prefix, own_modules(module), module), 0)
        self._hold(Holder(f"{name} non-persistent", non_persistent_buffers(module), module), 0)
        for hook in hooks_of(module):
            self._hooks.append((f"{prefix}{getattr(hook, '__name__', 'hook')}", hook))
        handle = vars(module).get("_private")
        if handle is not None and handle.own_forward is not None:
            self._hooks.append((f"{prefix}forward", handle.own_forward))
        if not self._is_covered:
            self._hold(Holder(prefix, vars(module)), 0)

    def _hold(self, holder: Holder, depth: int) -> None:
        values = holder.values
        if type(values) is CellType:
            try:
                values = [values.cell_contents]
            except ValueError:  # a variable that has no value yet
                return
        if len(values) > LENGTH:
            return
        (self.dicts if isinstance(values, dict) else self.others).append(holder)
        self._visit_held(holder, depth)

    def _visit_held(self, holder: Holder, depth: int = 0) -> None:
        values = holder.values
        if isinstance(values, dict):
            for key, value in [(k, v) for k, v in values.items() if k not in SKIPPED]:
                is_long = isinstance(key, Tensor | nn.Module)  # and slow to print
                name = type(key).__name__ if is_long else key
                self._visit(value, f"{holder.name}{name}", holder, key, depth + 1)
        else:
            for value in holder._all():
                self._visit(value, holder.name.rstrip("."), holder, None, depth + 1)

    def mark(self) -> "Mark":
        """Returns a mark of what is held now, also in what is held since the last one."""
        before, self._ids = self._ids, self._all_ids()
        if before != self._ids and self._has_new(set(before)):
            self.walk()
        return Mark(self)

    def _all_ids(self) -> list[int]:
        dicts = [holder.values for holder in self.dicts]
        return list(map(id, chain.from_iterable(map(dict.values, dicts))))

    def _has_new(self, known: set[int]) -> bool:
        """Returns whether a dict holds another object than before that may be a place itself."""
        return any(
            id(value) not in known
            and not isinstance(value, PLAIN)
            and key not in SKIPPED
            and (id(holder.values), key) not in self.harmless
            for holder in self.dicts
            for key, value in holder.values.items()
        )

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Puts back what the body replaces; `changes` of it are told to the `restored` around.

        The first body in a `restored` of runs is watched for writes: the others start where it did.
        """
        mark = self.mark()
        watch, self.watch = self.watch, None
        try:
            with nullcontext() if watch is None else watch:
                yield
        finally:
            self.changes += mark.replaced()
            mark.put_back()

    def is_harmless(self, change: Change) -> bool:
        return (id(change.holder.values), change.key) in self.harmless


class Mark:
    """Records what a `State` held at one moment.

    The values of all dicts are one list, made and compared without a loop in Python: a step
    makes several marks of thousands of dicts.
    """

    def __init__(self, state: State):
        self.state, self._dicts = state, state.dicts
        self.renew()

    def renew(self) -> None:
        """Takes the present for its moment."""
        dicts = [holder.values for holder in self._dicts]
        self._sizes = list(map(len, dicts))
        self._keys = list(chain.from_iterable(map(dict.keys, dicts)))
        self._values = list(chain.from_iterable(map(dict.values, dicts)))
        self._others = [(holder, holder.copy()) for holder in self.state.others]
        self._hooks = hooks_so_far()
        self.tensors = self.state.tensors
        self._versions = _versions(self.tensors)

    def forget_buffers(self) -> None:
        """Takes no notice of what is written to buffers."""
        self.tensors = [named for named in self.tensors if not named.is_buffer]
        self._versions = _versions(self.tensors)

    def _differing(self) -> Iterator[tuple[Holder, Any]]:
        """Returns holders of other objects now, and copies of what they held."""
        dicts = [holder.values for holder in self._dicts]
        now = chain.from_iterable(map(dict.values, dicts))
        if list(map(len, dicts)) != self._sizes or not all(map(is_, self._values, now)):
            start = 0
            for holder, size in zip(self._dicts, self._sizes, strict=True):
                values = self._values[start : start + size]
                if len(holder.values) != size or not all(map(is_, values, holder.values.values())):
                    yield holder, dict(zip(self._keys[start : start + size], values, strict=True))
                start += size
        yield from ((holder, copy) for holder, copy in self._others if not holder.is_as(copy))

    def replaced(self) -> list[Change]:
        """Returns what is another object now, or gone, or new."""
        return [h.change(key) for h, copy in self._differing() for key in h.changed(copy)]

    def changes(self) -> list[Change]:
        """Returns what was replaced or written to, without what is known to be harmless."""
        found = self.replaced() + [x.holder.change(x.key) for x in self.written()]
        return [change for change in dict.fromkeys(found) if not self.state.is_harmless(change)]

    def written(self) -> list[Named]:
        """Returns tensors that were written to, by their version counters."""
        now = _versions(self.tensors)
        if now == self._versions:
            return []
        moved = zip(self.tensors, now, self._versions, strict=True)
        return [named for named, new, old in moved if new != old]

    def put_back(self) -> list[tuple[dict, int, Any]]:
        """Puts back everything that was held; returns the hooks that have come since.

        A forward that registers hooks may note in an attribute that it has (Hugging Face's, for
        hidden states), and would register them again and again if that alone were put back.
        """
        for holder, copy in list(self._differing()):
            holder.put_back(copy)
        root = self.state.root
        if hooks_so_far() == self._hooks or not isinstance(root, nn.Module):
            return []
        return [hook for m in root.modules() for hook in take_hooks_since(m, self._hooks)]


def _has_memory(x: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return plain and x.device.type != "meta"


def _versions(tensors: list[Named]) -> list[tuple[int, int]]:
    """Returns numbers that each write and each `x.data = ...` change; the host does not wait."""
    return [(version_of(named.tensor), named.tensor.data_ptr()) for named in tensors]


class Writes(TorchDispatchMode):
    """Copies each tensor of a mark before the first operator that writes to its memory."""

    def __init__(self, mark: Mark):
        super().__init__()
        self.copies: dict[int, tuple[Named, Tensor, Tensor]] = {}
        self._places: dict[int, list[tuple[Named, Tensor]]] = {}
        for named in mark.tensors:
            alias = named.tensor.detach()
            if place := alias.untyped_storage().data_ptr():
                self._places.setdefault(place, []).append((named, alias))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, name in _written(function):
            value = args[place] if place < len(args) else kwargs.get(name)
            for x in value if isinstance(value, list | tuple) else (value,):
                if isinstance(x, Tensor) and _has_memory(x):
                    self._keep(x)
        return function(*args, **kwargs)

    def _keep(self, x: Tensor) -> None:
        for named, alias in self._places.pop(x.untyped_storage().data_ptr(), ()):
            self.copies[id(named)] = (named, alias, alias.clone())

    def put_back(self) -> list[Named]:
        """Give tensors their memory and values again; those that had others."""
        changed = []
        with torch.no_grad():
            for named, alias, value in self.copies.values():
                if not equal(alias, value):
                    changed.append(named)
                    alias.copy_(value)
            for group in [*self._places.values(), [(n, a) for n, a, _ in self.copies.values()]]:
                for named, alias in group:
                    now = named.tensor
                    if now.data_ptr() != alias.data_ptr() or now.shape != alias.shape:
                        changed.append(named)  # x.data = another
                        now.data = alias
        return changed


class Values:
    """Values of a mark's tensors: the sum of their bits, and copies unless they are parameters.

    It finds writes that raise no version counter, as those through `.data`, with one wait of the
    host, and without a look at every operator.
    """

    def __init__(self, mark: Mark):
        held = [(named, named.tensor.detach()) for named in mark.tensors]
        self._held = sorted(held, key=lambda pair: str(pair[1].device))
        self._copies = [
            None if isinstance(named.tensor, nn.Parameter) else alias.clone()
            for named, alias in self._held
        ]
        self._sums = self._sums_of_bits()

    def _sums_of_bits(self) -> list[Tensor]:
        """Returns those of all tensors, one tensor per device."""
        groups = groupby((alias for _, alias in self._held), lambda alias: alias.device)
        return [torch.stack([_sum_of_bits(x) for x in group]) for _, group in groups]

    @torch.no_grad()
    def put_back(self) -> list[Named]:
        """Gives tensors their memory and, unless they are parameters, values; those with others."""
        found: list[Named] = []
        for named, alias in self._held:
            now = named.tensor
            if now.data_ptr() != alias.data_ptr() or now.shape != alias.shape:
                found.append(named)  # x.data = another
                now.data = alias
        pairs = zip(self._sums, self._sums_of_bits(), strict=True)
        flags = [flag for old, new in pairs for flag in (old != new).tolist()]
        for (named, alias), copy, flag in zip(self._held, self._copies, flags, strict=True):
            if flag:
                found.append(named)
                if copy is not None:
                    alias.copy_(copy)
        return found


def _sum_of_bits(x: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(whole[x.element_size()]).sum(dtype=torch.int64)


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """Returns place and name of the arguments that an operator writes to."""
    schema = schema_of(function)
    if schema is None:
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def is_array(value: Any) -> bool:
    """Returns whether it is one of NumPy's arrays."""
    return type(value).__name__ == "ndarray"


def has_attributes(value: Any) -> bool:
    """Returns whether it is an object of a class that may keep values for a network."""
    package = type(value).__module__.partition(".")[0]
    return package not in OTHERS and not isinstance(value, type) and hasattr(value, "__dict__")


def equal(now: Tensor, value: Tensor) -> bool:
    """Returns whether two tensors are equal, NaN to NaN; the host waits."""
    if now.shape != value.shape or now.dtype != value.dtype:
        return False
    return bool(((now == value) | ((now != now) & (value != value))).all())


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether both are one object, or equal numbers or strings."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and (a == b or a != a))


def _same_plain(one: list, other: list) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))
