"""`register_layer`: gives a user's own layer class a function for its gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.layers.registered.built_in import KINDS

EXAMPLE = (
    "register_layer(Scale, lambda layer, gradient, x: "
    '{"scale": (gradient * x).flatten(1, -2).sum(1)})'
)


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

    @property
    def forms_gradients(self) -> bool:
        return self.gradients is not None


_REGISTERED: dict[type, Arithmetic] = {}


def register_layer(
    cls: type[nn.Module],
    fn: GradientFunction | None = None,
    *,
    norm: NormFunction | None = None,
    weighted_sum: SumFunction | None = None,
) -> None:
    """Gives a layer class arithmetic of its own, in every mode; without it `torch.vmap` runs it.

    Give one function, which computes per-sample gradients G [B, *parameter.shape], or two, which
    never form them. They are called in backward with the layer, the gradient of its output and the
    arguments of its forward. Their tensors have the samples in front: [B, ...], and [B, T, ...]
    where the network has flattened samples and tokens into one dimension. They return a dictionary
    with an entry for each parameter that the class itself owns; those of frozen parameters are left
    out.

    ========================================================== =====================================
    function                                                   entries
    ========================================================== =====================================
    `fn(layer, gradient, *args, **kwargs)`                     G [B, *parameter.shape], or a
                                                               `LinearProduct` for a weight
    `norm(layer, gradient, *args, **kwargs)`                   ‖G_i‖ [B], float32 or float64
    `weighted_sum(layer, gradient, c, *args, **kwargs)`        Σ_i c_i G_i [*parameter.shape], for
                                                               c [B]; float32 or float64
    ========================================================== =====================================

    G_i must depend on sample i alone. In batches 1, 2, 4, 8, ... the gradients of some samples are
    compared with autograd's for each of these alone, norms with those of what is summed, and a
    function that is wrong is refused. With two functions the guarantee needs more than that: a norm
    that is too small in a batch that is not looked at lets that sample contribute more than C.

    Args:
        cls: a module class that returns one tensor. Its subclasses are not registered with it.
        fn, norm, weighted_sum: of PyTorch's operators.

    Raises:
        ValueError: for a class that has arithmetic of its own, or another function already.
    """
    own = Arithmetic(fn, norm, weighted_sum)
    complete = (
        callable(fn)
        if norm is weighted_sum is None
        else (fn is None and callable(norm) and callable(weighted_sum))
    )
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and complete):
        raise ValueError(
            f"give a subclass of nn.Module and a function: {EXAMPLE}, or two: "
            "register_layer(Scale, norm=.., weighted_sum=..)"
        )
    for kind in chain.from_iterable(kind.classes for kind in KINDS):
        if issubclass(cls, kind) and cls.forward is kind.forward:
            raise ValueError(
                f"{cls.__name__} computes what nn.{kind.__name__} does, which has per-sample "
                "gradients already: leave register_layer out"
            )
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
