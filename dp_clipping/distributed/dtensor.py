"""Helpers for DTensors, and for modules and names that FSDP has wrapped.

Their packages take seconds to import, and are imported here only where one of them can be.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter


def local(x: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; any other tensor itself."""
    if type(x) is Tensor or not is_sharded(x):
        return x
    return x.to_local()  # type: ignore[attr-defined]


def is_sharded(x: Any) -> bool:
    """Returns whether it is a DTensor."""
    kind = type(x)
    if kind is Tensor or kind is Parameter or not isinstance(x, Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def fsdp_classes() -> tuple[type, ...]:
    """Returns the classes of modules in FSDP1 and FSDP2; () if nothing has imported them."""
    return _loaded("FullyShardedDataParallel") + _loaded("FSDPModule")


def is_fsdp1(module: nn.Module) -> bool:
    """Returns whether it is a `FullyShardedDataParallel`."""
    return isinstance(module, _loaded("FullyShardedDataParallel"))


def is_fsdp2(module: nn.Module) -> bool:
    """Returns whether `fully_shard` has been applied to it."""
    return isinstance(module, _loaded("FSDPModule"))


def _loaded(name: str) -> tuple[type, ...]:
    found = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return () if found is None else (found,)


def plain_type(module: nn.Module) -> type:
    """Returns the class that a module had before `fully_shard` gave it one of its own."""
    kind, fsdp = type(module), _loaded("FSDPModule")
    if isinstance(module, fsdp):
        return next(c for c in kind.__mro__[1:] if not issubclass(c, fsdp))
    return kind


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def shard_again(module: nn.Module) -> None:
    """Reshards FSDP2 modules that are still gathered, so that parameters are the optimizer's."""
    for one in module.modules():
        if is_fsdp2(one):
            one.reshard()


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns which module has a parameter of this one, and what it calls it.

    An attribute, whatever stands there: FSDP puts a gathered tensor in a parameter's place.
    """
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last
