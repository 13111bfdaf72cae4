"""A `.grad` that stands for a reduced gradient of which this rank has its slice only."""

import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.unused import tensors_in
from ddp.torch_compat import without_torch_functions

DIVIDED = (
    "{function}: gradients are divided among ranks, and .grad stands for one without its values: "
    "call model.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_(), and `for "
    "*_, g in model.gradient_pieces(): g.clamp_(-value, value)` in place of clip_grad_value_()"
)
PLAIN = (
    "{name} steps whole parameters, and of one of shape {shape} this rank has its own slice only, "
    "or the gradient of that: build it by model.make_optimizer({name}, lr=...), with the wrapper "
    "that reduced the gradients; if that was deleted, wrap the network and run a backward again"
)
_OPERATORS = "add sub mul truediv div floordiv mod pow and or xor"
WRITES = frozenset(["__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())])
CLEARING = frozenset(["zero_", "_foreach_zero_", "fill_", "detach_", "requires_grad_"])
READS_HOST = frozenset(["numpy", "tolist"])
COLLECTIVES = "torch.distributed.distributed_c10d"  # the module that has them


def name_of(func: Any) -> str:
    return func.__name__.partition(".")[0]  # that of an operator's overload follows


def first_of(args: tuple, kwargs: dict) -> Any:
    """Returns the first argument of a function of PyTorch."""
    return args[0] if args else kwargs.get("tensor", kwargs.get("input"))


def written_by(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """Returns the tensors that a function of PyTorch writes to, by its name."""
    name = name_of(func)
    is_in_place = name in WRITES or (name.endswith("_") and not name.endswith("__"))
    if name == "__set__":
        is_in_place = getattr(func.__self__, "__name__", "data") == "data"
    return tensors_in(first_of(args, kwargs) if is_in_place else kwargs.get("out"))


def is_collective(func: Any) -> bool:
    """Returns whether `torch.distributed` asks, whose C++ takes a tensor's memory next.

    It is called by `__torch_function__`, whose caller's module tells.
    """
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    caller = "" if frame is None else frame.f_globals.get("__name__", "")
    return caller == COLLECTIVES or "c10d" in (getattr(func, "__module__", None) or "")


class StandIn(Tensor):
    """A `.grad` that is NaN, because this rank has only its slice of the reduced gradient.

    Its views, as `.grad.data`, are stand-ins too, and what is written to them is written to it. So
    are its clones, which an optimizer may keep.
    """

    of: Tensor | None = None  # of which it is a view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of PyTorch.

        Raises:
            RuntimeError: if it takes a norm, communicates, writes anything but zeros to all
                elements, or is a plain optimizer's: that writes what follows from the values to
                other tensors, or joins them with a parameter.
        """
        communicates, name, kwargs = is_collective(func), name_of(func), kwargs or {}
        with without_torch_functions():
            found, written = list(tensors_in((args, kwargs))), list(written_by(func, args, kwargs))
            targets = [x for x in written if isinstance(x, StandIn)]
            joins_one = any(isinstance(x, Parameter) for x in found)
            is_used = len(targets) < len(written) or joins_one
            if is_used and (optimizer := stepping_optimizer()):
                refuse_plain(next(x for x in found if isinstance(x, StandIn)), optimizer)
            clears = name in CLEARING and (name != "fill_" or _is_zero(args[1]))
            is_part = any(x.of is not None and x.numel() != x.of.numel() for x in targets)
            is_written = bool(targets) and (not clears or is_part)
            if is_written or communicates or "norm" in name or name in READS_HOST:
                raise RuntimeError(DIVIDED.format(function=name))
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:  # as for a view of part of a stand-in's only number
                raise RuntimeError(DIVIDED.format(function=name)) from error
            for x in targets:
                if x.of is not None:
                    increment_version(x.of)  # which `.data` has of its own
            own = first_of(args, kwargs)
            if targets or not isinstance(own, StandIn):
                return result
            if name == "clone":
                return result.as_subclass(StandIn)
            if isinstance(result, list | tuple):
                return type(result)(_shown_of(own, x) for x in result)
            return _shown_of(own, result)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"a gradient {list(self.shape)}, divided among ranks"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return torch.full(self.shape, torch.nan, dtype=self.dtype, device=self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def _is_zero(x: Any) -> bool:
    """Returns whether a number, or a tensor of one on the host, is 0."""
    is_number = isinstance(x, int | float) or (isinstance(x, Tensor) and x.device.type == "cpu")
    return is_number and bool(x == 0)


def _shown_of(own: StandIn, x: Any) -> Any:
    """Returns what an operator makes of a stand-in: a stand-in too, if it is a view."""
    if not isinstance(x, Tensor) or x is own or memory_of(x) != memory_of(own):
        return x
    view = x.as_subclass(StandIn)
    view.of = own if own.of is None else own.of
    return view


def memory_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def stepping_optimizer() -> str:
    """Returns the name of the plain optimizer that is stepping in this thread; "" if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, Optimizer):
            return "" if getattr(caller, "steps_slices", False) else type(caller).__name__
        frame = frame.f_back
    return ""


def refuse_plain(parameter: Tensor, name: str) -> NoReturn:
    raise RuntimeError(PLAIN.format(name=name, shape=list(parameter.shape)))
