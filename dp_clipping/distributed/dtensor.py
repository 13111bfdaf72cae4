"""Helpers for DTensors, and for modules and names that FSDP has wrapped."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from dp_clipping.torch_compat import WRAPPED

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    DISTRIBUTED: tuple[type, ...] = (DTensor,)
    FSDP_MODULES: tuple[type, ...] = (FSDPModule, FullyShardedDataParallel)
else:
    DISTRIBUTED = FSDP_MODULES = ()


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return x.to_local() if isinstance(x, DISTRIBUTED) else x


def is_sharded(x: Tensor) -> bool:
    return isinstance(x, DISTRIBUTED)


def plain_type(module: nn.Module) -> type:
    """The class that a module had before `fully_shard` gave it one of its own."""
    kind = type(module)
    if dist.is_available() and isinstance(module, FSDPModule):
        return next(c for c in kind.__mro__[1:] if not issubclass(c, FSDPModule))
    return kind


def plain_name(name: str) -> str:
    """What a module or a parameter was called before FSDP1 wrapped what is on the way to it."""
    return name.replace(f"{WRAPPED}.", "").removesuffix(WRAPPED)


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def shard_again(module: nn.Module) -> None:
    """FSDP2 leaves its root gathered after a forward: other objects than an optimizer holds."""
    if dist.is_available():
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.reshard()


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Which module has a parameter of this one, and what it calls it.

    An attribute, whatever stands there: FSDP puts a gathered tensor in a parameter's place.
    """
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last
