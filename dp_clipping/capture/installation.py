"""Which layers of a network are captured, and how: their forwards are replaced, and put back."""

import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

from dp_clipping.distributed.dtensor import plain_name, plain_type
from dp_clipping.layers import convolution, embedding, group_norm, linear, norm
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.vmap import children
from dp_clipping.layers.vmap import module as vectorized

FORWARDS: dict[str, Callable[..., Any]] = {
    "linear": linear.forward,
    "conv1d": linear.forward,
    "convolution": convolution.forward,
    "embedding": embedding.forward,
    "group_norm": group_norm.forward,
    "rms_norm": norm.forward,
    "llama_rms_norm": norm.forward,
    "layer_norm": norm.forward,
    "vectorized": vectorized.forward,
    "child": children.forward,
}
CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


def kind_of(module: nn.Module) -> str:
    """Returns which of `FORWARDS` computes what this module does; `vectorized` is right for any."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if not names <= {"weight", "bias"} or nn.utils.parametrize.is_parametrized(module):
        return "vectorized"
    plain: Any = plain_type(module)
    method = plain.forward
    if method is nn.Linear.forward:
        return "linear"
    if method is nn.Embedding.forward:
        return "embedding"
    if convolution.is_plain(plain):
        return "convolution"
    if group_norm.is_plain(module, plain):
        return "group_norm"
    if method is nn.RMSNorm.forward:
        return "rms_norm"
    if method is nn.LayerNorm.forward and module.weight is not None:
        return "layer_norm"
    if norm.is_llama_rms_norm(module):
        return "llama_rms_norm"
    if plain.__name__ == "Conv1D" and plain.__module__ == "transformers.pytorch_utils":
        return "conv1d"
    return "vectorized"


def install(network: nn.Module, whole: Collection[nn.Module] | None) -> list[LayerState]:
    """Replaces the forwards of all modules that own trainable parameters.

    A module that owns bare parameters runs under vmap. Its child layers are captured as any others
    and run outside of it, unless it is one of `whole`; None: all are.
    """
    handles = []
    covered: set[nn.Module] = set()
    inside: set[nn.Module] = set()  # of modules whose children run outside of vmap
    called: set[nn.Module] = set()  # by their own code
    for name, module in network.named_modules():
        if module in covered or isinstance(module, CONTAINERS):
            continue
        if any(p.requires_grad for p in _owned(module)):
            kind = kind_of(module)
        elif module in called:
            kind = "child"
        else:
            continue
        trainable = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        is_apart = False
        if kind == "vectorized":
            is_apart = whole is not None and module not in whole and _can_be_apart(module)
            trainable = _own_names(module) if is_apart else _all_names(module)
            if is_apart:
                inside.update(child for child in module.modules() if child is not module)
                called.update(c for c in _called(module) if next(c.parameters(), None) is not None)
            else:
                covered.update(module.modules())
        handle = LayerState(plain_name(name), kind, module, tuple(trainable))
        handle.children_apart = is_apart
        forward = FORWARDS[kind]
        module._private = handle
        module.forward = types.MethodType(
            children.leaves_vmap(forward) if module in inside else forward, module
        )
        handles.append(handle)
    return handles


def uninstall(network: nn.Module) -> None:
    """Gives the modules their own forwards back."""
    for module in network.modules():
        if "_private" in vars(module):
            del module._private, module.forward


def _owned(module: nn.Module) -> Iterator[Parameter]:
    """Yields the module's own parameters, also those of its lists and parametrizations."""
    yield from _bare(module)
    if nn.utils.parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()
    # PEFT's DoRA multiplies weights of child layers, so they are captured together.
    magnitudes = getattr(module, "lora_magnitude_vector", None)
    if isinstance(magnitudes, nn.Module):
        yield from magnitudes.parameters()


def _bare(module: nn.Module) -> Iterator[Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the children that a module may call, also those in lists and dictionaries."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        elif not isinstance(child, CONTAINERS) and "forward" not in vars(child):
            yield child


def _all_names(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def _own_names(module: nn.Module) -> list[str]:
    """Returns the names of its trainable bare parameters, of one that has several all."""
    own = {id(p) for p in _bare(module)}
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, p in named if id(p) in own and p.requires_grad]


def _can_be_apart(module: nn.Module) -> bool:
    """Returns whether its own parameters are nobody else's, and a child has some that train."""
    own = {p for p in _bare(module) if p.requires_grad}
    if {p for p in _owned(module) if p.requires_grad} != own or len(_own_names(module)) != len(own):
        return False
    return any(p.requires_grad for child in _called(module) for p in child.parameters())
