"""Stand-ins: tensors without values, of which this rank has a slice only.

They are reduced gradients, and parameters of `fsdp` outside of their block's forward and backward.
A stand-in has the shape, dtype and device of the whole tensor, and the memory of one element. What
needs no values works as ever: sizes, hooks, `.grad`, `requires_grad`. Other functions of PyTorch
are refused with what to call. C++ that asks nobody, as `torch.func` does, reads NaN, and cannot
write.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.nn import Parameter

from ddp.internals.unused import tensors_in
from ddp.sharded.torch_compat import refuse_writes
from ddp.torch_compat import without_torch_functions

PARAMETER = (
    "{name}.{function}: fsdp has divided this parameter among ranks, and it has no values outside "
    "of its block's forward and backward: use it inside of `with model.whole_parameters():` on all "
    "ranks, save model.state_dict(), and step by model.make_optimizer(cls, lr=...). Where that "
    "model was deleted, build the network again"
)
TOO_EARLY = (
    "{name} has got a gradient that was computed outside of its block's backward, without its "
    "values: let the block's forward return each tensor on which the loss depends"
)
GRADIENT = (
    "{name}.grad: {function} of a gradient that is divided among ranks, so .grad has no values: "
    "call model.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_(), step by "
    "model.make_optimizer(cls, lr=...), and read or change the values of this rank in "
    "model.gradient_pieces()"
)

_ABOUT_NO_VALUE = """
    dim ndimension size numel nelement stride storage_offset element_size nbytes __len__
    is_contiguous is_floating_point is_complex is_signed is_inference is_conj is_neg is_shared
    is_same_size is_set_to get_device result_type can_cast untyped_storage
    _has_compatible_shallow_copy_type
    register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
    new_empty new_zeros new_ones new_full new_empty_strided
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
"""
ABOUT_NO_VALUE = frozenset(_ABOUT_NO_VALUE.split())
CONVERSIONS = frozenset(["to", "cpu", "cuda", "double", "float", "half", "bfloat16"])
VALUES = frozenset(["data", "T", "H", "mT", "mH", "real", "imag"])  # attributes


class StandIn(Tensor):
    """A tensor without values.

    Attributes:
        full_name: of the parameter.
        refusal: the message of an error.
    """

    full_name: str
    refusal, too_early = PARAMETER, TOO_EARLY

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:  # with respect to parameters
            outputs, inputs = args
            return func(outputs, [_edge_of(x) for x in inputs], **kwargs)
        with without_torch_functions():
            if is_about_no_value(func):
                return func(*args, **kwargs)
            # `model.to(device)` changes nothing where it is there.
            if name_of(func) in CONVERSIONS and func(*args, **kwargs) is args[0]:
                return args[0]
            if name_of(func) == "data" and args[0] is args[-1]:  # as there, or read
                return None if func.__name__ == "__set__" else args[0].like(func(*args))
        found = next(x for x in tensors_in((args, kwargs)) if isinstance(x, StandIn))
        raise RuntimeError(found.refusal.format(name=found.full_name, function=name_of(func)))

    def like(self, view: Tensor) -> Tensor:
        """Returns a stand-in for what this one stands for, which takes nothing, not even zeros."""
        made = view.as_subclass(StandIn)
        made.full_name, made.refusal = self.full_name, self.refusal
        return made

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"{self.full_name}, {list(self.shape)}, divided among ranks"

    def __format__(self, _spec: str) -> str:
        return repr(self)


class GradientStandIn(StandIn):
    """A `.grad` that stands for a reduced gradient.

    Attributes:
        owner: says which gradients have its slices.
        is_cleared: it was set to zero.
    """

    refusal = GRADIENT
    owner: Any
    is_cleared = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func) != "_foreach_zero_":  # of optimizer.zero_grad(set_to_none=False)
            return super().__torch_function__(func, types, args, kwargs)
        for x in args[0]:
            x.zero_()
        return None

    def zero_(self) -> Tensor:
        increment_version(self)  # as of any gradient that is written to
        self.is_cleared = True
        return self

    def to(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """Returns a stand-in for the same gradient in another dtype."""
        return gradient_stand_in(self, dtype, self.owner, self.full_name, self.is_cleared)


def gradient_stand_in(
    like: Tensor, dtype: torch.dtype, owner: Any, name: str, is_cleared: bool = False
) -> GradientStandIn:
    """Returns a stand-in for the gradient of a tensor of this shape and device."""
    own = nothing(dtype, like.device).data  # whose writes are counted apart
    made = own.expand(like.shape).as_subclass(GradientStandIn)
    made.full_name, made.owner, made.is_cleared = name, owner, is_cleared
    return made


def _edge_of(x: Tensor) -> Any:
    with without_torch_functions():
        return get_gradient_edge(x) if isinstance(x, StandIn) else x


def hide_all(parameters: list[Parameter], names: list[str], dtype: torch.dtype) -> None:
    """Makes parameters stand-ins, unless they are."""
    for parameter, name in zip(parameters, names, strict=True):
        if not isinstance(parameter, StandIn):
            parameter.data = nothing(dtype, parameter.device).expand(parameter.shape)
            parameter.__class__ = _divided(type(parameter))
            parameter.full_name = name  # type: ignore[attr-defined]  # of its class now


def reveal_all(parameters: list[Any], views: list[Tensor]) -> None:
    """Makes stand-ins ordinary parameters again, each with its view of the whole values."""
    for parameter, view in zip(parameters, views, strict=True):
        parameter.__class__ = type(parameter).__mro__[2]
        del parameter.full_name
        parameter.data = view


@cache
def _divided(cls: type[Parameter]) -> type[Parameter]:
    return type(f"Divided{cls.__name__}", (StandIn, cls), {"__module__": __name__})


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the memory of stand-ins, one element: NaN, which nothing can write to."""
    one = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    refuse_writes(one)
    return one


@cache
def is_about_no_value(func: Any) -> bool:
    """Returns whether a function, or access to an attribute, neither reads nor writes values."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return name_of(func) not in VALUES
    return name_of(func) in ABOUT_NO_VALUE


def name_of(func: Any) -> str:
    """Returns the name of a function, or of the attribute that it gets or sets."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "data")
    return func.__name__.partition(".")[0]  # that of an operator's overload follows
