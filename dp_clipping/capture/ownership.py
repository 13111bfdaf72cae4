"""Tells which parameters are a module's own, not those of layers that it calls, and its methods."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn import Parameter

LISTS = (nn.ParameterList, nn.ParameterDict)
CONTAINERS = (*LISTS, nn.ModuleList, nn.ModuleDict)


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
        if isinstance(child, LISTS):
            yield from child.parameters()


def trainable_names(
    module: nn.Module,
    with_children: bool,
    is_apart: bool,
    also: Iterable[Parameter] = (),
    is_under_vmap: bool = False,
) -> tuple[str, ...]:
    """Returns the names of the parameters that are captured with a module.

    All names of one that is used under several (`lstm.weight_hh_l1 = lstm.weight_hh_l0`), but for
    modules under vmap, where PyTorch ties them.

    Args:
        is_apart: only its bare parameters. A layer in it that has one of them too uses it by
            itself.
        also: parameters of layers in it, which its own code computes with.
    """
    if not is_apart:
        named = module.named_parameters(recurse=with_children, remove_duplicate=is_under_vmap)
        return tuple(name for name, p in named if p.requires_grad)
    lists = (name for name, child in module.named_children() if isinstance(child, LISTS))
    owners, those = {"", *lists}, {id(p) for p in also}
    return tuple(
        name
        for name, p in module.named_parameters(remove_duplicate=False)
        if p.requires_grad and (name.rpartition(".")[0] in owners or id(p) in those)
    )


def can_be_apart(module: nn.Module, also_frozen: bool = False) -> bool:
    """Returns whether a module's own parameters are bare ones, and it may call a trainable child.

    Args:
        also_frozen: a child need not be trainable.
    """
    own, plain = ({p for p in of(module) if p.requires_grad} for of in (owned, bare))
    if own != plain or isinstance(module, nn.MultiheadAttention):  # which reads its child's weights
        return False
    children = (child for child in module.children() if not isinstance(child, LISTS))
    return any(also_frozen or p.requires_grad for child in children for p in child.parameters())


def replaced_methods(module: nn.Module) -> set[str]:
    """Returns names of methods of its class that the module has attributes of its own for."""
    kind: Any = type(module)
    found = module.__dict__.keys() & _methods(kind)
    handle = module.__dict__.get("_private")
    if handle is not None and handle.own_forward is None:
        found.discard("forward")  # which a private model has put there
    return found


@lru_cache(maxsize=1024)
def _methods(kind: Any) -> frozenset[str]:
    own = {name for c in kind.__mro__ for name, value in vars(c).items() if callable(value)}
    # How it is copied is no arithmetic, and is what private training replaces (`calls`).
    return frozenset(own - (vars(nn.Module).keys() - {"forward"}) - {"__reduce_ex__"})


def computation_of(module: nn.Module) -> tuple[Any, Any, Callable, frozenset[str], set[str]]:
    """Returns an identity of the code it computes with, to be compared later.

    That is its own forward, its class, the class's forward, names of that class's methods, and
    those of them that the module has attributes of its own for.
    """
    kind: Any = type(module)
    own, methods = module.__dict__, _methods(kind)
    return own.get("forward"), kind, kind.forward, methods, own.keys() & methods
