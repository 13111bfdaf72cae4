"""Objects that a call can read and write beside its inputs and outputs.

They are reachable from a module's attributes and from arguments: lists, dicts, sets, dataclasses,
caches, objects with attributes or slots. A call that is only tried leaves them as they were.
"""

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.torch_compat import (
    PLAIN_LEAVES,
    own_buffers,
    own_modules,
    own_parameters,
    tree_leaves,
    version_of,
)

Path = tuple[Any, ...]

DEPTH, LENGTH = 32, 4096  # of nested objects; longer containers are data
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CODE = (FunctionType, BuiltinFunctionType, ModuleType, type)
OTHERS = {"torch", "numpy", "dp_clipping", "ddp", "opacus", "builtins", "logging", "enum"}
OWN = frozenset(vars(nn.Module())) | {  # what `nn.Module` and private training keep in a module
    "_private", "forward", "zero_grad", "__reduce_ex__", "_compiled_call_impl",
}  # fmt: skip


class Objects:
    """A snapshot of what the objects hold that are reachable from some roots.

    Args:
        values_of: number of the first roots, arguments, whose tensors in objects keep their values.

    Attributes:
        tensors: place -> tensor. Places in lists are counted from their end, so that they stay the
            same where a list is longer from call to call.
    """

    def __init__(self, *roots: Any, values_of: int = 0):
        self.tensors: dict[Path, Tensor] = {}
        self._held: list[tuple[_Contents, dict[Any, Any]]] = []
        self._seen: dict[int, Any] = {}
        self._values: list[tuple[Tensor, int, Tensor]] = []
        for number, root in enumerate(roots):
            self._visit(root, (number,))
            if number + 1 == values_of:
                self._keep_values({id(x) for x in tree_leaves(roots[:values_of])})

    def _keep_values(self, others: set[int]) -> None:
        for x in self.tensors.values():
            if id(x) not in others and not x.is_inference():
                self._values.append((x, version_of(x), x.detach().clone()))

    def _visit(self, value: Any, path: Path) -> None:
        if isinstance(value, Tensor):
            self.tensors[path] = value
            return
        if isinstance(value, (*PLAIN, *CODE)) or id(value) in self._seen or len(path) > DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, MethodType):
            self._visit(value.__self__, path)
        elif isinstance(value, partial):
            value = value.func, value.args, value.keywords
        if isinstance(value, tuple):
            for number, part in enumerate(value):
                self._visit(part, (*path, number))
        for number, contents in enumerate(_contents_of(value)):
            held = contents.read()
            self._held.append((contents, held))
            for key, part in held.items():
                self._visit(part, (*path, number, key))
        if isinstance(value, nn.Module):
            for name, child in own_modules(value).items():
                self._visit(child, (*path, name))

    def put_back(self) -> None:
        """Gives the objects what they held."""
        for contents, held in self._held:
            if not _are_same(contents.read(), held):
                contents.write(held)
        with torch.no_grad():
            for x, version, value in self._values:
                if version_of(x) != version:
                    x.copy_(value)

    def show(self, tensors: dict[int, Tensor]) -> None:
        """Puts other tensors in the place of those with these ids."""
        for contents, _ in self._held:
            held = contents.read()
            shown = {key: exchanged(value, tensors) for key, value in held.items()}
            if not _are_same(held, shown):
                contents.write(shown)

    def left_since(self, before: "Objects") -> dict[Path, Tensor]:
        """Returns the tensors that were not in these objects before."""
        known = {id(x) for x in before.tensors.values()}
        return {path: x for path, x in self.tensors.items() if id(x) not in known}


def exchanged(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Returns a value with others in the place of tensors with these ids, in tuples too."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if not isinstance(value, tuple) or isinstance(value, torch.Size):
        return value
    parts = [exchanged(part, tensors) for part in value]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    if hasattr(value, "_make"):
        return value._make(parts)
    return type(value)(parts)


def hold_objects(args: tuple, kwargs: dict) -> bool:
    """Returns whether arguments of a call are more than tensors, numbers and strings."""
    return not {*map(type, args), *map(type, kwargs.values())} <= PLAIN_LEAVES


def refuse_iterators(name: str, *trees: Any) -> None:
    """Refuses arguments that can be read once only.

    Raises:
        ValueError: naming the module.
    """
    for leaf in tree_leaves(trees):
        if isinstance(leaf, Iterator):
            raise ValueError(
                f"{name or 'the network'} is given an iterator ({type(leaf).__name__}), which can "
                "be read once, and its forward is run several times to see where the samples are: "
                "give it a list, as list(iterator)"
            )


class _Contents:
    """The contents of one container, or of an object's attributes, by key."""

    def __init__(self, owner: Any, slots: tuple[str, ...] = (), skipped: frozenset = frozenset()):
        self._owner, self._slots, self._skipped = owner, slots, skipped

    def read(self) -> dict[Any, Any]:
        owner = self._owner
        if self._slots:
            return {name: getattr(owner, name) for name in self._slots if hasattr(owner, name)}
        if isinstance(owner, dict):
            return {key: value for key, value in owner.items() if key not in self._skipped}
        start = -len(owner) if isinstance(owner, list | deque) else 0
        return dict(enumerate(owner, start))

    def write(self, held: dict[Any, Any]) -> None:
        owner = self._owner
        if self._slots:
            for name in self._slots:
                if name in held:
                    object.__setattr__(owner, name, held[name])
                elif hasattr(owner, name):
                    object.__delattr__(owner, name)
        elif isinstance(owner, dict):
            kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
            for key in [key for key in owner if key not in self._skipped]:
                kind.__delitem__(owner, key)
            for key, value in held.items():
                kind.__setitem__(owner, key, value)
        elif isinstance(owner, list):
            list.__setitem__(owner, slice(None), list(held.values()))
        else:  # a deque or a set
            owner.clear()
            (owner.extend if isinstance(owner, deque) else owner.update)(held.values())


def _contents_of(value: Any) -> Iterator[_Contents]:
    if isinstance(value, nn.Module):
        if not type(value).__module__.startswith("torch.distributed."):  # FSDP1 keeps its state
            yield _Contents(vars(value), skipped=OWN | own_parameters(value).keys())
        yield _Contents(own_buffers(value))
        return
    if isinstance(value, list | deque | dict | set) and len(value) <= LENGTH:
        yield _Contents(value)
    kind = type(value)
    if isinstance(value, partial | MethodType):
        return
    is_opened = kind.__module__.partition(".")[0] not in OTHERS
    if not is_opened and not isinstance(value, UserDict | UserList):
        return
    if isinstance(getattr(value, "__dict__", None), dict):
        yield _Contents(vars(value))
    slots = tuple(_slots_of(kind))
    if slots:
        yield _Contents(value, slots)


def _slots_of(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name


def _are_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Returns whether both have the same keys in the same order, for the same objects."""
    if len(one) != len(other):
        return False
    pairs = zip(one.items(), other.items(), strict=True)
    return all(a is b and _is_same_key(x, y) for (x, a), (y, b) in pairs)


def _is_same_key(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (*PLAIN, tuple)) and one == other)
