"""The kinds of layers, and which of them a module is: a new kind is a row of `KINDS`.

`register_layer` adds users' own classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import nn

from dp_clipping.capture.ownership import replaced_methods
from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.layers import attention, convolution, linear, norm
from dp_clipping.layers.embedding import bag
from dp_clipping.layers.embedding import module as embedding
from dp_clipping.layers.inner_call import Inner, inner_of
from dp_clipping.layers.recurrent import cells
from dp_clipping.layers.recurrent import kinds as recurrent_kinds
from dp_clipping.layers.recurrent import module as recurrent
from dp_clipping.layers.registered import module as registered
from dp_clipping.layers.registered.registry import (
    Arithmetic,
    GradientFunction,
    NormFunction,
    SumFunction,
    is_registered,
    register,
)
from dp_clipping.layers.rms_norm_copies import COPIES, rms_norm_kind
from dp_clipping.layers.vmap import module as vectorized


@dataclass(frozen=True)
class Kind:
    """A kind of layers.

    Attributes:
        name: its name in messages and in a `LayerState`.
        forward: runs a layer of it, in place of its class's forward.
        is_of: (module, its class) -> whether the module computes exactly what the kind does. No
            method of the module itself has been replaced, and its parameters are its own.
        classes: PyTorch's classes of it, which `register_layer` refuses.
        names_parameters: its parameters have other names than weight and bias.
        learns_outputs: samples are looked for in its outputs; else they stay where they are.
        is_linear: its weights are those of products, so that several uses of one can be joined.
    """

    name: str
    forward: Callable[..., Any]
    is_of: Callable[[nn.Module, Any], bool] = lambda module, plain: False
    classes: tuple[type[nn.Module], ...] = ()
    names_parameters: bool = False
    learns_outputs: bool = False
    is_linear: bool = False


def has_forward_of(kind: type[nn.Module]) -> Callable[[nn.Module, Any], bool]:
    """Returns what tells a class that has the forward of this one, as PyTorch has it."""
    forward = kind.forward
    return lambda module, plain: plain.forward is forward


def _is_conv1d_of_transformers(module: nn.Module, plain: type) -> bool:
    return (plain.__name__, plain.__module__) == ("Conv1D", "transformers.pytorch_utils")


KINDS = (
    Kind(
        "recurrent", recurrent.forward, lambda module, _: recurrent_kinds.is_plain(module),
        recurrent_kinds.LAYERS, names_parameters=True, learns_outputs=True, is_linear=True,
    ),
    Kind(
        "cell", cells.forward, lambda module, _: recurrent_kinds.is_plain_cell(module),
        recurrent_kinds.CELLS, names_parameters=True, learns_outputs=True, is_linear=True,
    ),
    Kind(
        "attention", attention.forward, attention.is_plain, (nn.MultiheadAttention,),
        names_parameters=True, learns_outputs=True, is_linear=True,
    ),
    Kind("linear", linear.forward, has_forward_of(nn.Linear), (nn.Linear,), is_linear=True),
    Kind("embedding", embedding.forward, has_forward_of(nn.Embedding), (nn.Embedding,)),
    Kind("embedding_bag", bag.forward, bag.is_plain, (nn.EmbeddingBag,)),
    Kind(
        "convolution", convolution.forward, lambda _, plain: convolution.is_plain(plain),
        convolution.KINDS,
    ),
    Kind("group_norm", norm.forward_of_channels, norm.is_plain_of_channels, norm.OF_CHANNELS),
    Kind("rms_norm", norm.forward, has_forward_of(nn.RMSNorm), (nn.RMSNorm,)),
    Kind("layer_norm", norm.forward, has_forward_of(nn.LayerNorm), (nn.LayerNorm,)),
    Kind("conv1d", linear.forward, _is_conv1d_of_transformers, is_linear=True),
    *(Kind(name, norm.forward) for name in COPIES),  # which `rms_norm_kind` knows
)  # fmt: skip
ALL = {
    kind.name: kind
    for kind in (
        *KINDS,
        Kind("registered", registered.forward, learns_outputs=True),
        Kind("vectorized", vectorized.forward, learns_outputs=True),
    )
}
"""All kinds by name; `vectorized` is right for any module."""

READ = {"weight", "bias", "__getattr__", "__getattribute__"}


def kind_of(module: nn.Module) -> str:
    """Returns the name of the kind that computes what this module does.

    Raises:
        ValueError: its class computes its weight in a property, so no parameter is what it reads.
    """
    plain: Any = plain_type(module)
    is_plain = not replaced_methods(module)
    if is_plain and (found := _of_kinds(module, plain, names_parameters=True)):
        return found
    if is_registered(module) and not nn.utils.parametrize.is_parametrized(module) and is_plain:
        return "registered"
    if not _has_plain_weights(module):
        return "vectorized"
    if _reads_otherwise(plain):
        raise ValueError(
            f"{plain.__name__} reads its weight or bias through a property or __getattr__ of its "
            "own, so what it computes with is no parameter: register that computation with "
            'torch.nn.utils.parametrize.register_parametrization(layer, "weight", ...)'
        )
    if not is_plain:
        return "vectorized"
    found = _of_kinds(module, plain, names_parameters=False)
    return found or rms_norm_kind(module, plain) or "vectorized"


def _of_kinds(module: nn.Module, plain: Any, names_parameters: bool) -> str | None:
    mine = (kind for kind in KINDS if kind.names_parameters == names_parameters)
    return next((kind.name for kind in mine if kind.is_of(module, plain)), None)


def inner_layer(module: nn.Module) -> Inner | None:
    """Returns the layer whose call in a subclass's own forward may be captured; None: no such.

    No method of the module itself was replaced.
    """
    is_plain = _has_plain_weights(module) and not replaced_methods(module)
    return inner_of(plain_type(module)) if is_plain else None


def _has_plain_weights(module: nn.Module) -> bool:
    """Returns whether weight, and perhaps bias, are all of the module's own parameters."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    is_parametrized = nn.utils.parametrize.is_parametrized(module)
    return "weight" in names and names <= {"weight", "bias"} and not is_parametrized


@lru_cache(maxsize=1024)
def _reads_otherwise(kind: Any) -> bool:
    """Returns whether a class changes how its weight is read: by a property, for example."""
    before = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return any(READ & vars(c).keys() for c in before)


EXAMPLE = (
    "register_layer(Scale, lambda layer, gradient, x: "
    '{"scale": (gradient * x).flatten(1, -2).sum(1)})'
)


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
    register(cls, own)
