"""Finds where a network holds values from one batch to the next, and which have changed.

`State` lists the places: parameters, buffers, attributes of modules and their classes, the contents
of their lists, dicts and objects, and variables that methods and hooks name, of enclosing functions
and of modules. A `Mark` records them at one moment: references and version counters, which the host
reads without waiting for a GPU. `writes` keeps values too. `carried` decides what may change.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from dp_clipping.capture.checks.code_names import (
    OTHERS,
    function_of,
    is_data,
    is_users_function,
    is_users_module,
    names_in,
)
from dp_clipping.capture.checks.holders import (
    PLAIN,
    SKIPPED,
    Change,
    Holder,
    Named,
    Names,
    has_memory,
    is_array,
    is_dunder,
)
from dp_clipping.distributed.dtensor import is_fsdp1
from dp_clipping.layers.vmap.objects import Objects
from dp_clipping.torch_compat import (
    hooks_of,
    hooks_so_far,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
    take_hooks_since,
    versions_of,
)

DEPTH, LENGTH = 5, 4096  # of nested containers; longer ones are data of other kinds


class State:
    """All places where a network, or another callable object, holds values.

    It visits each kind of place by a method of its own.

    Args:
        root: a module, or any object.
        is_sharded: it is a sharded network. FSDP puts other tensors in the place of its parameters
            between forward and backward, so they are left out; FSDP1 does so by attributes, which
            are left out too.
    """

    def __init__(self, root: Any, is_sharded: bool = False):
        self.root, self.is_sharded = root, is_sharded
        self.harmless: dict[tuple[int, Any], Any] = {}  # what changes and carries nothing: its dict
        self.changes: list[Change] = []  # of what has been rewound
        self.watch: AbstractContextManager | None = None  # of the next body that is rewound
        self.walk()

    def walk(self) -> None:
        """Searches for the places again."""
        self.dicts: list[Holder] = []  # those of dicts
        self.sets: list[Holder] = []  # those of sets
        self.others: list[Holder] = []
        self.tensors: list[Named] = []
        self._seen: dict[int, Any] = {}
        self._variables: dict[int, Names] = {}  # of modules
        self._classes: set[type] = set()
        self._is_covered = False
        self._is_for_the_user = not isinstance(self.root, nn.Module)
        if self.is_sharded:
            self._is_covered = any(is_fsdp1(m) for m in self.root.modules())
        self._functions: list[tuple[str, Any]] = []
        self._visit(self.root, "", None, None, 0)
        self._is_for_the_user = True  # what only functions know
        for name, function in self._functions:  # which leads to more of them
            self._visit(function, name, None, None, 1)
        self._seen.clear()
        self.held = [holder.values for holder in self.dicts]
        self.held_sets = [holder.values for holder in self.sets]
        self._ids = Mark(self).ids()

    def _visit(self, value: Any, name: str, holder: Holder | None, key: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or depth > DEPTH:
            return
        if isinstance(value, Tensor):
            is_kept = value.grad_fn is None  # others live for one step
            if is_kept and holder is not None and id(value) not in self._seen:
                self._seen[id(value)] = value
                if has_memory(value) and not value.is_inference():
                    self.tensors.append(Named(value, holder, key))
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, dict | list | deque | set | CellType):
            self._hold(Holder(f"{name}.", value), depth)
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
            if vars(value):
                self._hold(Holder(f"{name}.", vars(value)), depth)
            if is_users_function(value):
                self._visit_variables(value, depth)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif has_attributes(value):
            self._hold(Holder(f"{name}.", vars(value)), depth)
            self._visit_class(type(value), depth)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        if not self.is_sharded:
            self._hold(Holder(prefix, own_parameters(module), "parameters"), 0)
        temporary = non_persistent_buffers(module)
        self._hold(Holder(prefix, own_buffers(module), "buffers", temporary), 0)
        self._hold(Holder(prefix, own_modules(module), "modules"), 0)
        self._hold(Holder(f"{name} non-persistent", temporary, "temporary"), 0)
        for hook in hooks_of(module):
            if getattr(hook, "__module__", "").partition(".")[0] == "dp_clipping":
                continue  # what a trial keeps
            self._functions.append((f"{prefix}{getattr(hook, '__name__', 'hook')}", hook))
        handle = vars(module).get("_private")
        if handle is not None and handle.own_forward is not None:
            self._functions.append((f"{prefix}forward", handle.own_forward))
        if not self._is_covered:
            self._hold(Holder(prefix, vars(module)), 0)
        self._visit_class(type(module), 0)

    def _visit_class(self, kind: type, depth: int) -> None:
        """Visits attributes and methods of a class and of those that it inherits from."""
        for one in kind.__mro__:
            if one in self._classes or not is_users_module(one.__module__):
                continue
            self._classes.add(one)
            holder = Names(f"{one.__name__}.", one)
            self.others.append(holder)
            for key, value in holder.copy().items():
                name = f"{one.__name__}.{key}"
                function = function_of(value)
                if function is not None:
                    self._functions.append((name, function))
                elif not is_dunder(key):
                    self._visit(value, name, holder, key, depth + 1)

    def _visit_variables(self, function: FunctionType, depth: int) -> None:
        """Visits the variables of modules that a function names."""
        names, namespace = names_in(function.__code__), function.__globals__
        for name in names.read | names.written:
            value = namespace.get(name)
            if isinstance(value, ModuleType):
                if is_users_module(value.__name__):
                    for attribute in names.attributes & vars(value).keys():
                        self._visit_variable(vars(value), attribute, depth)
            else:
                self._visit_variable(namespace, name, depth, name in names.written)

    def _visit_variable(
        self, namespace: dict[str, Any], name: str, depth: int, is_written: bool = False
    ) -> None:
        value, prefix = namespace.get(name), f"{namespace.get('__name__', '')}."
        if not is_data(value):
            self._functions.append((name, value))
        elif is_written or name in namespace:
            holder = self._variables.get(id(namespace))
            if holder is None:
                holder = Names(prefix, namespace, is_log=True, names=set())
                self._variables[id(namespace)] = holder
                self.others.append(holder)
            if holder.add(name):
                self._visit(value, f"{prefix}{name}", holder, name, depth + 1)

    def _hold(self, holder: Holder, depth: int) -> None:
        values, holder.is_log = holder.values, self._is_for_the_user
        if type(values) is CellType:
            try:
                values = [values.cell_contents]
            except ValueError:  # a variable that has no value yet
                return
        if len(values) > LENGTH:
            return
        own = self.dicts if isinstance(values, dict) else self.others
        (self.sets if type(values) is set else own).append(holder)
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
        """Returns a mark of all values that are held now, including those in new objects."""
        mark = Mark(self)
        before, self._ids = self._ids, mark.ids()
        if before != self._ids and self._has_new(set(before)):
            self.walk()
            mark = Mark(self)
        return mark

    def _has_new(self, known: set[int]) -> bool:
        """Returns whether a dict holds another object than before that may be a place itself."""
        return any(
            id(value) not in known
            and not isinstance(value, PLAIN)
            and key not in SKIPPED
            and (id(holder.values), key) not in self.harmless
            for holder, values in self._held_by_name()
            for key, value in values.items()
        )

    def _held_by_name(self) -> Iterator[tuple[Holder, dict]]:
        yield from ((holder, holder.values) for holder in self.dicts)
        yield from ((holder, holder.copy()) for holder in self.others if type(holder) is Names)

    @contextmanager
    def rewound(self, *given: Any, only_given: bool = False) -> Iterator[None]:
        """Restores what the body replaces, and adds it to `changes` for the enclosing `restored`.

        The first body in a `restored` of runs is watched for writes: the others start where it did.

        Args:
            given: arguments of a call. What objects in them hold is restored too.
            only_given: nothing else is.
        """
        roots = given if only_given else (*given, self.root)
        objects = Objects(*roots, values_of=len(given))
        try:
            with nullcontext() if only_given else self._rewound():
                yield
        finally:
            objects.put_back()

    @contextmanager
    def _rewound(self) -> Iterator[None]:
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

    The values of all dicts are one list, made and compared without a loop in Python, and so are
    all sets: a step makes several marks of thousands of dicts.
    """

    def __init__(self, state: State):
        self.state, self._dicts, self._held = state, state.dicts, state.held
        self._sets, self._held_sets = state.sets, state.held_sets
        self.renew()

    def renew(self) -> None:
        """Takes the present for its moment."""
        self._sizes = list(map(len, self._held))
        self._keys = list(chain.from_iterable(self._held))
        self._values = list(chain.from_iterable(map(dict.values, self._held)))
        self._copies = list(map(set.copy, self._held_sets))
        self._others = [(holder, holder.copy()) for holder in self.state.others]
        self._hooks = hooks_so_far()
        self.tensors = self.state.tensors
        self._versions = _versions(self.tensors)

    def ids(self) -> list[int]:
        """Returns the identities of what dicts and named variables hold."""
        copies = [copy.values() for holder, copy in self._others if type(holder) is Names]
        return list(map(id, chain(self._values, *copies)))

    def forget_buffers(self) -> None:
        """Ignores writes to buffers."""
        self.tensors = [named for named in self.tensors if named.holder.kind != "buffers"]
        self._versions = _versions(self.tensors)

    def _differing(self) -> Iterator[tuple[Holder, Any]]:
        """Returns holders of other objects now, and copies of what they held."""
        now = chain.from_iterable(map(dict.values, self._held))
        if list(map(len, self._held)) != self._sizes or not all(map(is_, self._values, now)):
            start = 0
            for holder, size in zip(self._dicts, self._sizes, strict=True):
                values = self._values[start : start + size]
                if len(holder.values) != size or not all(map(is_, values, holder.values.values())):
                    yield holder, dict(zip(self._keys[start : start + size], values, strict=True))
                start += size
        if self._held_sets != self._copies:
            pairs = zip(self._sets, self._copies, strict=True)
            yield from ((holder, copy) for holder, copy in pairs if holder.values != copy)
        yield from ((holder, copy) for holder, copy in self._others if not holder.is_as(copy))

    def replaced(self) -> list[Change]:
        """Returns the objects that were replaced, removed or added."""
        return [h.change(key) for h, copy in self._differing() for key in h.changed(copy)]

    def changes(self) -> list[Change]:
        """Returns values that were replaced or written to, without those known to be harmless."""
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


def _versions(named: list[Named]) -> list[tuple[int, int]]:
    """Returns numbers that each write and each `x.data = ...` change; the host does not wait."""
    tensors = [one.tensor for one in named]
    return list(zip(versions_of(tensors), map(Tensor.data_ptr, tensors), strict=True))


def has_attributes(value: Any) -> bool:
    """Returns whether the value's class may keep values for a network in attributes."""
    package = type(value).__module__.partition(".")[0]
    return package not in OTHERS and not isinstance(value, type) and hasattr(value, "__dict__")
