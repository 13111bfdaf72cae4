"""The functions for gradients that users have given their own layer classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dp_clipping.distributed.dtensor import plain_type


@dataclass(frozen=True)
class LinearProduct:
    """Per-sample gradients of a weight [O, I] as a product: G_i = Σ_t y_it a_itᵀ.

    A function given to `register_layer` returns it in place of G [B, O, I], which is then never
    formed where norms and sums are cheaper without it, as for `nn.Linear`.

    Attributes:
        activations: a [B, T, I].
        gradients: y [B, T, O], of the same dtype.
    """

    activations: Tensor
    gradients: Tensor


GradientFunction = Callable[..., Mapping[str, Tensor | LinearProduct]]
NormFunction = Callable[..., Mapping[str, Tensor]]
SumFunction = Callable[..., Mapping[str, Tensor]]


@dataclass(frozen=True)
class Arithmetic:
    """The functions a class was registered with: `gradients`, or `norm` and `weighted_sum`."""

    gradients: GradientFunction | None
    norm: NormFunction | None
    weighted_sum: SumFunction | None


_REGISTERED: dict[type, Arithmetic] = {}


def register(cls: type[nn.Module], own: Arithmetic) -> None:
    """Keeps the functions of a class.

    Raises:
        ValueError: it has others already.
    """
    if _REGISTERED.get(cls, own) != own:
        raise ValueError(
            f"{cls.__name__} is registered with another function: register a subclass, as "
            f"class My{cls.__name__}({cls.__name__}): pass"
        )
    _REGISTERED[cls] = own


def is_registered(module: nn.Module) -> bool:
    """Returns whether exactly this class was given to `register_layer`."""
    return plain_type(module) in _REGISTERED


def arithmetic_of(module: nn.Module) -> Arithmetic:
    """Returns the functions with which its class was registered."""
    kind: Any = plain_type(module)
    return _REGISTERED[kind]


def refuse_where_unfit(name: str, module: nn.Module, sharding: Any) -> None:
    """Raises ValueError for a registered layer of a network that ranks share."""
    if sharding is not None:
        raise ValueError(
            f"{name or 'the network'} ({type(module).__name__}) has a function of register_layer, "
            "which would compute with the part of its parameters that a rank has: make the network "
            "private unsharded, as make_private(module=ddp.wrap(name, network), ..), or do not "
            "register the class, and torch.vmap runs it"
        )


def checked(
    found: Any, shapes: Mapping[str, tuple[int, ...]], who: str, are_gradients: bool = False
) -> dict[str, Any]:
    """Returns the entries of a user function's result that belong to trainable parameters.

    Args:
        shapes: name of a trainable parameter -> the shape of its entry.
        who: a name for the function in messages.
        are_gradients: an entry may be in 16 bit, or a `LinearProduct`.

    Raises:
        ValueError: an entry is missing, or has another shape or dtype.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{who} returns {type(found).__name__}: return a dictionary of tensors")
    for name, shape in shapes.items():
        one = found.get(name)
        if are_gradients and isinstance(one, LinearProduct):
            a, y = one.activations, one.gradients
            is_product = a.dim() == y.dim() == 3 and a.shape[:2] == y.shape[:2]
            if not is_product or a.dtype != y.dtype or shape != (len(a), y.shape[2], a.shape[2]):
                raise ValueError(
                    f"{who} returns activations {list(a.shape)} ({a.dtype}) and gradients "
                    f"{list(y.shape)} ({y.dtype}) for {name!r} {list(shape[1:])}: return "
                    f"LinearProduct(a [B, T, I], y [B, T, O]) of one dtype, B = {shape[0]}"
                )
        elif not isinstance(one, Tensor) or tuple(one.shape) != shape:
            given = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
            raise ValueError(f"{who} returns {given} for {name!r}: return a tensor {list(shape)}")
        elif not one.is_floating_point() or not (are_gradients or one.element_size() >= 4):
            raise ValueError(
                f"{who} returns {one.dtype} for {name!r}, whose rounding is felt in the bound on a "
                "sample: compute in float32, as gradient.float()"
            )
    return {name: found[name] for name in shapes}
