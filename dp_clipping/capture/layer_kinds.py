"""Chooses the arithmetic of a captured layer, and checks that it still fits in later steps."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from torch import nn

from dp_clipping.capture.rms_norms import rms_norm_kind
from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.layers.inner_call import Inner, inner_of
from dp_clipping.layers.registered import module as registered
from dp_clipping.layers.registered.built_in import KINDS, Kind
from dp_clipping.layers.registered.registry import is_registered
from dp_clipping.layers.vmap import module as vectorized

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
    is_parametrized = nn.utils.parametrize.is_parametrized(module)
    if is_registered(module) and not is_parametrized and is_plain:
        return "registered"
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if "weight" not in names or names - {"weight", "bias"} or is_parametrized:
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

    Its weight and bias are its own parameters, and no method of the module itself was replaced.
    """
    names = {name for name, _ in module.named_parameters(recurse=False)}
    is_parametrized = nn.utils.parametrize.is_parametrized(module)
    if "weight" not in names or names - {"weight", "bias"} or is_parametrized:
        return None
    return None if replaced_methods(module) else inner_of(plain_type(module))


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


@lru_cache(maxsize=1024)
def _reads_otherwise(kind: Any) -> bool:
    """Returns whether a class changes how its weight is read: by a property, for example."""
    before = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return any(READ & vars(c).keys() for c in before)


class Arithmetic:
    """Records what captured modules compute with, to be compared in each step.

    Args:
        modules: the captured modules, once they have their forwards.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self._before = [(name, module, *_signature(module)) for name, module in modules]

    def refuse_changes(self) -> None:
        """Raises RuntimeError naming layers whose methods were replaced since `make_private`."""
        for name, module, forward, kind, own_forward, methods, replaced in self._before:
            own = module.__dict__
            if (
                own.get("forward") != forward
                or type(module) is not kind
                or kind.forward is not own_forward
                or (own.keys() & methods) != replaced
            ):
                raise RuntimeError(
                    f"forward, another method or the class of {name or 'the network'} "
                    f"({type(module).__name__}) was replaced after make_private, and its "
                    "per-sample gradients are of what it computed before: replace methods before "
                    "make_private, or register a forward hook"
                )


def _signature(module: nn.Module) -> tuple[Any, Any, Callable, frozenset[str], set[str]]:
    """Returns an identity of the code it computes with, to be compared later.

    That is its own forward, its class, the class's forward, names of that class's methods, and
    those of them that the module has attributes of its own for.
    """
    kind: Any = type(module)
    own, methods = module.__dict__, _methods(kind)
    return own.get("forward"), kind, kind.forward, methods, own.keys() & methods
