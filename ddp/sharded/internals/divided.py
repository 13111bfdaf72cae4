"""Parameters that `fsdp` has divided, where functions of PyTorch use them outside of their block.

Where nothing computes with a parameter, `fsdp` makes it a stand-in: the same object, of another
class, whose functions PyTorch hands to `call` below.

    shape, dtype, .grad, hooks         as of any parameter
    views of it, `.data` among them    stand-ins too, which remember how they were made
    functions in place, and `.data =`  work on whole values, of which each rank keeps its slice
    all others                         work on whole values, and have gradients

The last two are collective calls, which the ranks agree on before. So what is written is not lost,
and what is read is not garbage. Refused are functions that work on a tensor's memory without a call
to here: of `torch.func`, of `torch.distributed`, and those that return the memory. While its block
computes, a parameter is an ordinary one, and PyTorch calls nothing here.
"""

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.nn import Parameter

from ddp.internals.unused import tensors_in
from ddp.sharded.internals.stand_in import (
    first_of,
    is_collective,
    name_of,
    refuse_plain,
    stepping_optimizer,
    written_by,
)
from ddp.sharded.torch_compat import refuse_writes, register_tree
from ddp.torch_compat import version_of, without_torch_functions

GONE = (
    "{name} has no values, because the wrapper that has divided it is deleted: build another "
    "network, and load the wrapper's state_dict() into it before"
)
UNFIT = (
    "{what} gives it other memory, another shape or a graph, where each rank has a slice of it: "
    "copy values into it, under torch.no_grad()"
)
UNLIKE = (
    "a value for .data is of shape {shape}, {dtype}, on {device}, and the parameter is not, which "
    "fsdp has divided among ranks: build a new network and load the wrapper's state_dict() into it"
)
EXCHANGED = (
    "{name} was exchanged for another tensor, as by torch.utils.swap_tensors(), where this rank "
    "has a slice of it: copy values into it, under torch.no_grad()"
)
REPLACED = (
    "this is a view of what {name} was before it got other .data: take a copy before that, as by "
    "parameter.data.clone()"
)
LEAVES = (
    "{name}.{function}() would give its memory to others, and this rank has a slice of it: take a "
    "copy, parameter.detach().clone()"
)
IN_TRANSFORM = (
    "{name} in the arguments of a function of torch.func, and this rank has a slice of it: call "
    "that inside of `with model.whole_parameters():`, or, in a loss, with parameter.clone()"
)
IN_COLLECTIVE = (
    "{name} in a function of torch.distributed, and this rank has a slice of it: call that inside "
    "of `with model.whole_parameters():`, for a parameter that model.parameters() returns there"
)

_ABOUT_NO_VALUE = """
    dim ndimension size numel nelement stride storage_offset element_size nbytes __len__
    is_contiguous is_floating_point is_complex is_signed is_inference is_conj is_neg is_shared
    is_same_size is_set_to get_device untyped_storage result_type can_cast has_names
    register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
    new_empty new_zeros new_ones new_full new_empty_strided
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
"""
ABOUT_NO_VALUE = frozenset(_ABOUT_NO_VALUE.split())
MEMORY = frozenset(["storage", "_typed_storage", "as_strided", "__dlpack__"])
LIKE = frozenset(["view_as", "reshape_as", "expand_as", "type_as"])  # of the second: no value
VIEWS = frozenset(["data", "T", "H", "mT", "mH", "real", "imag"])


@dataclass(frozen=True)
class Place:
    """Which values of a unit a stand-in is for, and how it was made from its parameter."""

    unit: weakref.ref[Any]  # a `DividedUnit` of views.py
    member: int
    name: str
    replaced: int = 0
    views: tuple[Callable[[Tensor], Tensor], ...] = ()

    def values(self) -> Any:
        if (unit := self.unit()) is None:
            raise RuntimeError(GONE.format(name=self.name))
        if self.views and self.replaced != unit.replaced[self.member]:
            raise RuntimeError(REPLACED.format(name=self.name))
        return unit

    @property
    def key(self) -> tuple[int, int]:
        return id(self.values()), self.member

    def of(self, whole: dict[tuple[int, int], Tensor]) -> Tensor:
        """Returns what this stand-in is of one of the whole values."""
        value = whole[self.key]
        for view in self.views:
            value = view(value)
        return value


class Divided(Tensor):
    """A tensor without values, whose functions PyTorch hands to `call`."""

    _place: Place
    is_divided = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            first = next(_stand_ins((args, kwargs)))
            raise RuntimeError(IN_COLLECTIVE.format(name=first._place.name))
        if is_about_no_value(func):
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        return call(func, args, kwargs or {})

    def as_subclass(self, _cls: type) -> NoReturn:  # which PyTorch hands to nobody
        raise RuntimeError(LEAVES.format(name=self._place.name, function="as_subclass"))

    def __deepcopy__(self, memo: dict) -> Tensor:
        new = self.detach().clone()
        if isinstance(self, Parameter):
            new = type(self).__mro__[2](new, requires_grad=self.requires_grad)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


class _Leaf(Divided):
    """A view of a stand-in where that lies in nested arguments."""


def _as_leaf(x: Divided, caller: str) -> Divided:
    """Returns what functions of nested arguments, called by code of a module, see of a stand-in.

    Raises:
        RuntimeError: in `torch.func`, which wraps memory in C++.
    """
    if caller.startswith("torch._functorch"):
        raise RuntimeError(IN_TRANSFORM.format(name=x._place.name))
    with without_torch_functions():
        leaf: Any = x.view_as(x)
    leaf.__class__, leaf._place = _Leaf, x._place
    return leaf


register_tree(Divided, _as_leaf)


@cache
def _divided(cls: type[Parameter]) -> type[Parameter]:
    made = type(f"Divided{cls.__name__}", (Divided, cls), {"__module__": __name__})
    register_tree(made, _as_leaf)
    return made


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns all that C++ sees of stand-ins, one element: it reads NaN, and cannot write."""
    one = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    refuse_writes(one)
    return one


def hide_all(parameters: list[Parameter], places: list[Place], dtype: torch.dtype) -> None:
    """Makes parameters stand-ins, which have the memory of one element."""
    for parameter, place in zip(parameters, places, strict=True):
        if not isinstance(parameter, Divided):
            parameter.data = nothing(dtype, parameter.device).expand(parameter.shape)
            parameter.__class__ = _divided(type(parameter))
            parameter._place = place  # type: ignore[attr-defined]  # of its class now


def reveal_all(parameters: list[Parameter], places: list[Place], views: list[Tensor]) -> None:
    """Makes stand-ins ordinary parameters again, each with its view of the whole values."""
    for parameter, place, view in zip(parameters, places, views, strict=True):
        if not isinstance(parameter, Divided):
            raise RuntimeError(EXCHANGED.format(name=place.name))
        parameter.__class__ = type(parameter).__mro__[2]
        del parameter._place
        parameter.data = view


@cache
def is_about_no_value(func: Any) -> bool:
    """Returns whether a function, or access to an attribute, neither reads nor writes values."""
    name = name_of(func)
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "data") not in VIEWS
    return name in ABOUT_NO_VALUE


def call(func: Any, args: tuple, kwargs: dict) -> Any:
    """Calls a function of PyTorch that has stand-ins among its arguments.

    Raises:
        RuntimeError: on every rank, if ranks do different things; if slices cannot follow a write.
    """
    name = name_of(func)
    own = first_of(args, kwargs)
    if name in LIKE and not isinstance(own, Divided):
        with without_torch_functions():
            return func(*args, **kwargs)
    first, *others = _stand_ins((args, kwargs))
    if name in ("__repr__", "__format__"):
        return f"{first._place.name}, {list(first.shape)}, divided among ranks"
    if name == "data_ptr":
        return 0  # as of any tensor without memory
    if name in MEMORY:
        raise RuntimeError(LEAVES.format(name=first._place.name, function=name))
    if func in (torch.autograd.grad, torch.autograd.backward):
        with without_torch_functions():
            args, kwargs = _replace((args, kwargs), get_gradient_edge)
        return func(*args, **kwargs)
    targets = [x for x in written_by(func, args, kwargs) if isinstance(x, Divided)]
    if own is first and not targets and (not others or name in LIKE):
        view = _view(first, func, args[1:], kwargs)
        if view is not None:
            return view
    what = f"{first._place.name}.{name}()"
    if targets:
        if optimizer := stepping_optimizer():
            refuse_plain(targets[0], optimizer)
        if name == "__set__":
            if args[1] is args[0]:
                return None
            func, name = _assign, "data = "
        what = f"{targets[0]._place.name}.{name}(arguments {_digest((args, kwargs)):08x})"
    if (ask_all := first._place.values().before_use()) is not None:
        ask_all(what)
    whole = _gather([first, *others], are_written=bool(targets))
    written = whole if targets else {}
    before = {key: (x.data_ptr(), x.shape, version_of(x)) for key, x in written.items()}
    made: list[tuple[Divided, Tensor]] = []

    def substitute(x: Divided) -> Tensor:
        value = x._place.of(whole)
        made.append((x, value if targets else _with_gradient(x, value)))
        return made[-1][1]

    new_args, new_kwargs = _replace((args, kwargs), substitute)
    result = func(*new_args, **new_kwargs)
    for key, place in {x._place.key: x._place for x in targets}.items():
        _keep(place, whole[key], before[key], what)
        place.values().replaced[place.member] += func is _assign
    if name == "numpy":
        result.flags.writeable = False  # a copy
    return next((x for x, value in made if value is result), result)  # as of `parameter.cpu()`


def _keep(place: Place, whole: Tensor, before: tuple[int, torch.Size, int], what: str) -> None:
    """Keeps this rank's slice of a whole parameter that was written to."""
    pointer, shape, version = before
    if (whole.data_ptr(), whole.shape) != (pointer, shape) or whole.grad_fn is not None:
        raise RuntimeError(UNFIT.format(what=what))
    unit = place.values()
    unit.keep({place.member: whole})
    unit.free()  # what was gathered before
    if version_of(whole) != version:
        with without_torch_functions():
            increment_version(unit.parameters[place.member])  # autograd compares it


def _assign(parameter: Tensor, value: Tensor) -> None:
    """Does what `parameter.data = value` does, by a copy."""
    shape, dtype, device = value.shape, value.dtype, value.device
    if (shape, dtype, device) != (parameter.shape, parameter.dtype, parameter.device):
        raise RuntimeError(UNLIKE.format(shape=list(shape), dtype=dtype, device=device))
    parameter.data.copy_(value)


class _Gathered(torch.autograd.Function):
    """Returns a parameter's whole value, whose gradient is the parameter's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_parameter: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Needs nothing for backward."""

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _with_gradient(x: Divided, value: Tensor) -> Tensor:
    """Returns the value of a stand-in, whose gradient is the stand-in's."""
    value = value.to(x.dtype)
    with without_torch_functions():  # a view: `torch.func` looks into arguments of a Function
        return _Gathered.apply(x.view_as(x), value) if x.requires_grad else value


@torch.inference_mode(False)
def _gather(stand_ins: Iterable[Divided], are_written: bool) -> dict[tuple[int, int], Tensor]:
    """Returns copies of the whole values behind stand-ins, leaves as these if they are written."""
    places = {x._place.key: x._place for x in stand_ins}
    units = {id(place.values()): place.values() for place in places.values()}
    values = {key: unit.gather(unit.shard) for key, unit in units.items()}
    found = {(key, i): values[key][i].clone() for key, i in places}  # without the rest of a unit
    if not are_written:
        return found
    return {
        (key, i): Parameter(value, units[key].parameters[i].requires_grad)
        for (key, i), value in found.items()
    }


def _view(of: Divided, func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns stand-ins for what a function returns, if that is views; else None."""
    with without_torch_functions():
        probe = torch.empty(of.shape, dtype=of.dtype, device="meta")
        are_views = False
        with suppress(Exception):  # it wants values, or a transform runs
            memory, result = probe.untyped_storage(), func(probe, *args, **kwargs)
            if result is probe:
                return of
            parts = result if isinstance(result, list | tuple) else [result]
            are_views = all(isinstance(x, Tensor) and x.untyped_storage() is memory for x in parts)
        if not are_views:
            return None
        shown = func(of, *args, **kwargs)

    def made(x: Tensor) -> Any:
        return func(x, *args, **kwargs)

    def member(i: int) -> Callable[[Tensor], Tensor]:
        return lambda x: made(x)[i]

    if parts is not result:
        return _named(of, shown, made)
    return type(result)(_named(of, part, member(i)) for i, part in enumerate(shown))


def _named(of: Divided, shown: Tensor, view: Callable[[Tensor], Tensor]) -> Divided:
    made: Any = shown
    made.__class__ = Divided
    place = of._place
    made._place = replace(
        place,
        views=(*place.views, view),
        replaced=place.replaced if place.views else place.values().replaced[place.member],
    )
    return made


def _stand_ins(x: Any) -> Iterator[Divided]:
    """Returns the stand-ins among arguments."""
    return (found for found in tensors_in(x) if isinstance(found, Divided))


def _replace(x: Any, substitute: Callable[[Any], Any]) -> Any:
    """Returns arguments with something in place of each stand-in."""
    if isinstance(x, Divided):
        return substitute(x)
    if isinstance(x, dict):
        return {key: _replace(value, substitute) for key, value in x.items()}
    return type(x)(_replace(y, substitute) for y in x) if type(x) in (list, tuple) else x


def _digest(x: Any) -> int:
    """Returns a number by which arguments of other values differ; stand-ins have none."""
    if isinstance(x, dict):
        x = list(x.items())
    if isinstance(x, list | tuple):
        return zlib.crc32(b"".join(_digest(item).to_bytes(4, "big") for item in x))
    if isinstance(x, Divided):
        return zlib.crc32(x._place.name.encode())
    if isinstance(x, Tensor):
        values = x.detach().cpu().resolve_conj().resolve_neg()
        # A copy: memory that `numpy()` has shown cannot be freed, as a unit's is.
        values = values.clone(memory_format=torch.contiguous_format).reshape(-1)
        return zlib.crc32(values.view(torch.uint8).numpy().tobytes(), x.dim())
    is_plain = isinstance(x, bool | int | float | complex | str | slice | torch.dtype)
    return zlib.crc32(repr(x).encode()) if is_plain else 0
