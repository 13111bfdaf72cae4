"""Separates a module's own parameters from those of layers that it calls."""

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn import Parameter

CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


def owned(module: nn.Module) -> Iterator[Parameter]:
    """Yields the module's own parameters, also those of its lists and parametrizations."""
    yield from bare(module)
    if nn.utils.parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()
    # PEFT's DoRA multiplies weights of child layers, so they are captured together.
    if isinstance(module, nn.MultiheadAttention):  # its own code computes with that weight
        yield from module.out_proj.parameters()
    magnitudes = getattr(module, "lora_magnitude_vector", None)
    if isinstance(magnitudes, nn.Module):
        yield from magnitudes.parameters()


def bare(module: nn.Module) -> Iterator[Parameter]:
    """Yields the module's own parameters, also those of its lists and dictionaries."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


def called_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the children that a module may call, also those in lists and dictionaries."""
    if isinstance(module, nn.MultiheadAttention):  # which reads the weights of its only child
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from called_by(child)
        elif not isinstance(child, CONTAINERS):
            yield child


def own_names(module: nn.Module, also: Iterable[Parameter] = ()) -> list[str]:
    """Returns the names that a module has for its trainable bare parameters; all of one.

    A layer in it that has one of them too uses it by itself.

    Args:
        also: parameters of layers in it, which its own code computes with.
    """
    lists = (nn.ParameterList, nn.ParameterDict)
    owners = {"", *(name for name, child in module.named_children() if isinstance(child, lists))}
    those = {id(p) for p in also}
    named = module.named_parameters(remove_duplicate=False)
    return [
        name
        for name, p in named
        if p.requires_grad and (name.rpartition(".")[0] in owners or id(p) in those)
    ]


def trainable_names(
    module: nn.Module,
    with_children: bool,
    is_apart: bool,
    also: Iterable[Parameter] = (),
    is_under_vmap: bool = False,
) -> tuple[str, ...]:
    """Returns the names of the parameters that are captured with a module; see `own_names`.

    All names of one that is used under several (`lstm.weight_hh_l1 = lstm.weight_hh_l0`), but for
    modules under vmap, where PyTorch ties them.
    """
    if is_apart:
        return tuple(own_names(module, also))
    named = module.named_parameters(recurse=with_children, remove_duplicate=is_under_vmap)
    return tuple(name for name, p in named if p.requires_grad)


def can_be_apart(module: nn.Module, also_frozen: bool = False) -> bool:
    """Returns whether a module's own parameters are bare ones, and it may call a trainable child.

    Args:
        also_frozen: a child need not be trainable.
    """
    if {p for p in owned(module) if p.requires_grad} != {
        p for p in bare(module) if p.requires_grad
    }:
        return False
    children = (p for child in called_by(module) for p in child.parameters())
    return any(also_frozen or p.requires_grad for p in children)
