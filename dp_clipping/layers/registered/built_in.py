"""The kinds of layers that have arithmetic of their own: a new kind is a row of `KINDS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dp_clipping.layers import convolution, group_norm, linear, norm
from dp_clipping.layers.attention import module as attention
from dp_clipping.layers.embedding import bag
from dp_clipping.layers.embedding import module as embedding
from dp_clipping.layers.recurrent import cells
from dp_clipping.layers.recurrent import kinds as recurrent_kinds
from dp_clipping.layers.recurrent import module as recurrent


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
    Kind("group_norm", group_norm.forward, group_norm.is_plain, group_norm.KINDS),
    Kind("rms_norm", norm.forward, has_forward_of(nn.RMSNorm), (nn.RMSNorm,)),
    Kind("layer_norm", norm.forward, has_forward_of(nn.LayerNorm), (nn.LayerNorm,)),
    Kind("conv1d", linear.forward, _is_conv1d_of_transformers, is_linear=True),
    *(Kind(name, norm.forward) for name in norm.COPIES),  # which `capture.rms_norms` knows
)  # fmt: skip
