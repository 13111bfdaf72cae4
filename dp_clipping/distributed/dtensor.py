"""Helpers for DTensors, and for modules and names that FSDP has wrapped.

Their packages take seconds to import. They are imported here only if an object may be theirs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

WRAPPED = "_fsdp_wrapped_module"  # the child of each module that FSDP1 wraps around another


def local(x: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor. Returns any other tensor as it is."""
    if type(x) is Tensor or not is_sharded(x):
        return x
    return x.to_local()  # type: ignore[attr-defined]


def is_sharded(x: Any) -> bool:
    """Returns whether x is a DTensor."""
    kind = type(x)
    if kind is Tensor or kind is Parameter or not isinstance(x, Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def fsdp_classes() -> tuple[type, ...]:
    """Returns the classes of FSDP1 and FSDP2 modules; () if FSDP has not been imported."""
    return _loaded("FullyShardedDataParallel") + _loaded("FSDPModule")


def is_fsdp1(module: nn.Module) -> bool:
    """Returns whether the module is a `FullyShardedDataParallel`."""
    return isinstance(module, _loaded("FullyShardedDataParallel"))


def is_fsdp2(module: nn.Module) -> bool:
    """Returns whether `fully_shard` has been applied to the module."""
    return isinstance(module, _loaded("FSDPModule"))


def _loaded(name: str) -> tuple[type, ...]:
    found = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return () if found is None else (found,)


def plain_type(module: nn.Module) -> type:
    """Returns the class that a module had before `fully_shard` replaced it."""
    kind, fsdp = type(module), _loaded("FSDPModule")
    if isinstance(module, fsdp):
        return next(c for c in kind.__mro__[1:] if not issubclass(c, fsdp))
    return kind


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def plain_name(name: str) -> str:
    """Returns the name of a module or a parameter before FSDP1 wrapped modules around it."""
    return name.replace(f"{WRAPPED}.", "").removesuffix(WRAPPED).removesuffix(".")


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the submodule that owns parameter `name`, and the parameter's name in it.

    The attribute may be another tensor: FSDP puts a gathered tensor in the parameter's place.
    """
    path, _, last = name.rpartition(".")
    return (module.get_submodule(path) if path else module), last
