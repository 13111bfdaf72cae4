"""Detects how a module is sharded: by FSDP1, FSDP2, tensor parallelism, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from dp_clipping.distributed.dtensor import is_fsdp1, is_fsdp2, is_sharded, local, size_of
from dp_clipping.distributed.sharding import ParameterPart, Sharding, owned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_UNIT_SIZE = 8  # parameters that are handled together, where no FSDP module groups them


def sharding_of(
    module: nn.Module, data_parallel_group: dist.ProcessGroup | None = None
) -> Sharding | None:
    """Returns how the module is sharded; None if it is not.

    Args:
        data_parallel_group: ranks that train the same tensor-parallel parts on other samples.

    Raises:
        ValueError: where gradient synchronisation cannot be controlled.
    """
    if not dist.is_available():
        return None
    if hasattr(module, "whole_parameters"):
        return _of_wrapper(module)
    if any(is_fsdp1(m) for m in module.modules()):
        from dp_clipping.distributed import fsdp1

        return fsdp1.flat_sharding_of(module)
    wrapped = [name for name, m in module.named_modules() if is_fsdp2(m)]
    if wrapped and not is_fsdp2(module):
        raise ValueError(
            f"fully_shard (FSDP2) has been applied to {', '.join(wrapped[:3])}, but not to the "
            "module itself, so nothing controls when its gradients are synchronised: call "
            "fully_shard(module) on the root too"
        )
    if wrapped and data_parallel_group is None:
        return _of_fsdp(module)
    if any(is_sharded(p) for p in module.parameters()):
        if wrapped or hasattr(module, "gradient_ready"):
            raise ValueError(
                "the module is sharded and has a data-parallel wrapper or a data_parallel_group "
                "beside: give the sharded module itself; data_parallel_group is for tensor "
                "parallelism alone, fully_shard brings its own"
            )
        return _of_tensor_parallel(module, data_parallel_group)
    if data_parallel_group is not None:
        raise ValueError(
            "data_parallel_group is for tensor-parallel modules: wrap an ordinary one with ddp.wrap"
        )
    return None


def _of_wrapper(module: Any) -> Sharding:
    """Returns that of `ddp.wrap("fsdp", ..)`, whose parameters are whole where a layer computes."""
    parts = {
        parameter: ParameterPart(parameter.shape, number)
        for number, unit in enumerate(module.units)
        for parameter in unit.parameters
    }
    group = module.process_group
    return Sharding(
        api='wrap("fsdp", ..)', data_parallel_group=group, tensor_group=None, everyone=group,
        replicas=None, shards=group, parts=parts, by_wrapper=True,
        gathered=frozenset(block.module for block in module.blocks[1:]),
    )  # fmt: skip


def _of_fsdp(root: nn.Module) -> Sharding:
    parts: dict[Parameter, ParameterPart] = {}
    data: dict[DeviceMesh, int] = {}  # mesh -> how many of its dimensions are data axes
    tensor: set[DeviceMesh] = set()
    gathering = []
    modules: list[Any] = [m for m in root.modules() if is_fsdp2(m)]
    sharded = [{p: n for p, n in own.items() if is_sharded(p)} for own in owned(modules)]
    units = [(module, names) for module, names in zip(modules, sharded, strict=True) if names]
    for unit, (module, names_of) in enumerate(units):
        is_plain = all(p.device_mesh.ndim == 1 for p in names_of)
        if not is_plain:
            module.unshard()
        try:
            gathered = dict(module.named_parameters())
            gathering.append((module, {p: name for p, name in names_of.items() if p.requires_grad}))
            for parameter, name in names_of.items():  # frozen ones too: they tell the axes as well
                now = gathered[name]
                inner = now.device_mesh if now is not parameter and is_sharded(now) else None
                if inner is not None:
                    tensor.add(inner)
                mesh = parameter.device_mesh
                axes = data[mesh] = mesh.ndim - (0 if inner is None else inner.ndim)
                dims = [p.dim for p in parameter.placements[:axes] if hasattr(p, "dim")]
                shape = parameter.shape if inner is None else local(now).shape
                split = inner is not None and any(p.is_shard() for p in now.placements)
                if parameter.requires_grad:
                    parts[parameter] = ParameterPart(shape, unit, dims[0] if dims else None, split)
        finally:
            if not is_plain:
                module.reshard()
    missing = [n for n, p in root.named_parameters() if p.requires_grad and p not in parts]
    if missing:
        raise ValueError(
            f"fully_shard was told to ignore {', '.join(missing[:5])}, which nothing synchronises: "
            "shard or freeze them"
        )
    largest = max(mesh.ndim for mesh in data)
    mesh, *others = (mesh for mesh in data if mesh.ndim == largest)
    if others:
        raise ValueError(
            f"parts of the model are sharded over different meshes ({[mesh, *others]}): private "
            "training takes one"
        )
    if len(tensor) > 1 or any(one.ndim > 1 for one in tensor):
        raise ValueError(
            f"the model's parameters are split over several tensor-parallel meshes ({tensor}): "
            "private training takes one, with one axis"
        )
    if (axes := data[mesh]) > 2:
        raise ValueError(
            f"FSDP2 (fully_shard) over a mesh of {axes} data axes: private training takes one or "
            "two"
        )
    shards = data_parallel_group = mesh.get_group(axes - 1)
    if axes == 2:
        others_there = tuple(mesh.get_coordinate()[axes:])
        ranks = mesh.mesh[(slice(None),) * axes + others_there]
        data_parallel_group = _group(ranks.flatten().tolist())
    return Sharding(
        api="FSDP2 (fully_shard)" + (" x tensor parallel" if tensor else ""),
        data_parallel_group=data_parallel_group,
        tensor_group=next(iter(tensor)).get_group() if tensor else None,
        everyone=_group(mesh.mesh.flatten().tolist()) if tensor else data_parallel_group,
        replicas=mesh.get_group(0) if axes == 2 else None, shards=shards, parts=parts,
        gathering=tuple(gathering), managed=root,
        gathered=frozenset(modules) - {root},
    )  # fmt: skip


def _of_tensor_parallel(
    module: nn.Module, data_parallel_group: dist.ProcessGroup | None
) -> Sharding:
    meshes = {p.device_mesh for p in module.parameters() if is_sharded(p)}
    if len(meshes) > 1 or next(iter(meshes)).ndim > 1:
        raise ValueError(
            f"the model's parameters are DTensors on {len(meshes)} meshes ({meshes}) and not "
            "managed by fully_shard: private training takes one tensor-parallel mesh of one axis"
        )
    mesh = next(iter(meshes))
    parts = {
        p: ParameterPart(
            local(p).shape, number // DEFAULT_UNIT_SIZE,
            split=is_sharded(p) and any(q.is_shard() for q in p.placements),
        )
        for number, p in enumerate(p for p in module.parameters() if p.requires_grad)
    }  # fmt: skip
    group = mesh.get_group()
    everyone = group
    if data_parallel_group is not None:
        everyone = dist.group.WORLD
        if dist.get_world_size() != size_of(data_parallel_group) * size_of(group):
            raise ValueError(
                f"{size_of(data_parallel_group)} data-parallel x {size_of(group)} tensor-parallel "
                f"ranks are not the {dist.get_world_size()} of the world: private training takes "
                "all of them"
            )
        with torch.no_grad():
            for x in (*module.parameters(), *module.buffers()):
                dist.broadcast(local(x), group=data_parallel_group, group_src=0)
    return Sharding(
        "tensor parallel", data_parallel_group, group, everyone, None, data_parallel_group, parts,
    )  # fmt: skip


def _group(ranks: list[int]) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(sorted(ranks), use_local_synchronization=True)
