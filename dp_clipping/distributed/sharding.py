"""Sharded models: which ranks share what.

| axis of the mesh | samples on its ranks | a parameter on its ranks |
| --- | --- | --- |
| data (FSDP's) | different | shards; gathered to be whole wherever a layer computes |
| tensor parallel | the same | parts, each computed with where it lies; or replicated |

How clipped sums find their shards is in `sharded_sums`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from dp_clipping.distributed.placement import Place, place_of

if TYPE_CHECKING:
    from dp_clipping.distributed.gradient_reduce import ShardedSums

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Shard

    DISTRIBUTED: tuple[type, ...] = (DTensor,)
    FSDP_MODULES: tuple[type, ...] = (FSDPModule, FullyShardedDataParallel)
else:
    DISTRIBUTED = FSDP_MODULES = ()

LOG = logging.getLogger(__name__)
UNIT = 8  # parameters that are handled together where no FSDP module says so


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
    return name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module")


@dataclass(frozen=True)
class Part:
    """What of a parameter a rank computes with, and where its shard of that lies.

    Attributes:
        shape: of what layers compute with: the parameter, or the tensor-parallel part of it.
        unit: number of the FSDP module that gathers it; 0 where there is none.
        dim: dimension along which the data axis shards that; None: not sharded.
        split: it is a part, and other members of the tensor-parallel axis have the others.
    """

    shape: torch.Size
    unit: int = 0
    dim: int | None = None
    split: bool = False


Gathering = tuple[nn.Module, dict[Parameter, str]]
"""A module, and the names in it of the trainable parameters that it gathers."""


@dataclass(frozen=True)
class Sharding:
    """How a model is spread over ranks.

    Attributes:
        api: what has sharded it, for messages.
        data_group: ranks with other samples and the same parts of parameters; None: no such axis.
        tensor_group: ranks with the same samples and other parts; None: no such axis.
        everyone: all ranks of both.
        replicas: of the data axis's ranks, those that hold the same shard (hybrid sharding).
        shards: of the data axis's ranks, those among which parameters are sharded.
        parts: trainable parameter -> its part.
        gathering: modules before whose forward whole parameters take the place of shards.
        managed: the root that FSDP2 manages.
    """

    api: str
    data_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    parts: dict[Parameter, Part] = field(repr=False)
    gathering: tuple[Gathering, ...] = field(repr=False, default=())
    managed: nn.Module | None = field(repr=False, default=None)
    _layouts: dict[tuple[Tensor, torch.dtype], Any] = field(repr=False, default_factory=dict)

    @cached_property
    def units(self) -> dict[int, list[Parameter]]:
        """Number of an FSDP module -> its trainable parameters."""
        found: dict[int, list[Parameter]] = {}
        for parameter, part in self.parts.items():
            found.setdefault(part.unit, []).append(parameter)
        return found

    @cached_property
    def unit_bytes(self) -> dict[int, int]:
        """Number of an FSDP module -> float32 bytes of its trainable parameters, the same on all
        ranks: of whole ones, even where a rank computes with parts."""
        sizes = {
            p: p.numel() if is_sharded(p) else part.shape.numel() for p, part in self.parts.items()
        }
        return {unit: 4 * sum(sizes[p] for p in own) for unit, own in self.units.items()}

    @cached_property
    def bytes(self) -> int:
        """The same of all of them."""
        return sum(self.unit_bytes.values())

    @classmethod
    def of(cls, module: nn.Module, data_group: dist.ProcessGroup | None = None) -> Sharding | None:
        """What has sharded the module; None: nothing has.

        Args:
            data_group: ranks that train the same tensor-parallel parts on other samples.

        Raises:
            ValueError: where gradient synchronisation cannot be controlled.
        """
        if not dist.is_available():
            return None
        if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
            from dp_clipping.distributed import fsdp1

            return fsdp1.sharding_of(module)
        wrapped = [name for name, m in module.named_modules() if isinstance(m, FSDPModule)]
        if wrapped and not isinstance(module, FSDPModule):
            raise ValueError(
                f"fully_shard (FSDP2) has been applied to {', '.join(wrapped[:3])}, but not to the "
                "module itself, so nothing controls when its gradients are synchronised: call "
                "fully_shard(module) on the root too"
            )
        if wrapped and data_group is None:
            return _of_fsdp(module)
        if any(isinstance(p, DTensor) for p in module.parameters()):
            if wrapped or hasattr(module, "gradient_ready"):
                raise ValueError(
                    "the module is sharded and has a data-parallel wrapper or a data_group beside: "
                    "give the sharded module itself; data_group is for tensor parallelism alone, "
                    "fully_shard brings its own"
                )
            return _of_tensor_parallel(module, data_group)
        if data_group is not None:
            raise ValueError(
                "data_group is for tensor-parallel modules: wrap an ordinary one with ddp.wrap"
            )
        return None

    def like(self, parameter: Tensor, part: Tensor) -> Tensor:
        """This rank's part of something with a parameter's layout, as what the parameter is.

        `DTensor.from_local` takes the host as long as several launches, so the layout that it found
        serves again. The constructor for that has no public name (torch 2.11 to 2.13).
        """
        if not is_sharded(parameter):
            return part
        layout = self._layouts.get((parameter, part.dtype))
        if layout is not None:
            return DTensor(part, layout, requires_grad=False)
        made = DTensor.from_local(
            part, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        self._layouts[parameter, part.dtype] = getattr(made, "_spec", None)
        return made

    def make_sums(self) -> ShardedSums:
        from dp_clipping.distributed.gradient_reduce import ShardedSums

        return ShardedSums(self)

    def place_of(self, parameter: Parameter) -> Place | None:
        """Where this rank's part of a parameter lies; None: it has all of it."""
        return place_of(parameter)

    def backward(self) -> AbstractContextManager:
        """Around every backward, each of the two of a two-pass mode."""
        return nullcontext()

    def entered(self, module: nn.Module, inputs: Callable[[], list[Tensor]]) -> None:
        """Called in private forwards when one of `gathering` has gathered its parameters."""

    def watch(self, note: Callable[[Parameter], None]) -> list[RemovableHandle]:
        """Let `note` be called with each parameter that autograd adds a gradient to.

        Where that is to something else than the parameter: FSDP2 runs the parameter's own hooks.
        """
        return []

    def stands_for(self, now: Tensor | None, before: Parameter) -> bool:
        """Whether FSDP has put `now` in the place of a parameter: a gathered one, which is no
        DTensor, or one on the tensor-parallel mesh."""
        if now is None or self.managed is None:
            return False
        return not is_sharded(now) or now.device_mesh != before.device_mesh

    def recover(self) -> bool:
        """After a forward or backward that failed: whether the next one can be right.

        FSDP2 takes a root for gathered that a backward has left half-way, and would compute with
        old values; torch 2.13 has a way to tell it.
        """
        if self.managed is None:
            return True
        reset = getattr(self.managed, "reset_iter_state", None)
        if reset is not None:
            reset()
        return reset is not None

    def describe(self) -> str:
        data, tensor = size_of(self.data_group), size_of(self.tensor_group)
        axes = f"{data} data-parallel" + (f" x {tensor} tensor-parallel" if tensor > 1 else "")
        return f"{self.api}: {axes} ranks; gradients are synchronised by dp_clipping alone"


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _of_fsdp(root: nn.Module) -> Sharding:
    parts: dict[Parameter, Part] = {}
    data: dict[DeviceMesh, int] = {}  # how many of its dimensions are data axes
    tensor: set[DeviceMesh] = set()
    units = _units(root)
    gathering = []
    for unit, (module, own) in enumerate(units):
        meshes = {p.device_mesh for p in own}
        if not all(mesh.ndim == 1 for mesh in meshes):
            module.unshard()
        try:
            gathered = dict(module.named_parameters())
            names = {p: name for p, name in own.items() if p.requires_grad}
            gathering.append((module, names))
            for parameter, name in own.items():  # frozen ones too: they tell the axes as well
                now = gathered[name]
                inner = now.device_mesh if now is not parameter and is_sharded(now) else None
                if inner is not None:
                    tensor.add(inner)
                mesh, placements = parameter.device_mesh, parameter.placements
                axes = mesh.ndim - (0 if inner is None else inner.ndim)
                kinds = placements[:axes]
                dims = [p.dim for p in kinds if isinstance(p, Shard) or hasattr(p, "dim")]
                shape = parameter.shape if inner is None else local(now).shape
                split = inner is not None and any(p.is_shard() for p in now.placements)
                data[mesh] = axes
                if parameter.requires_grad:
                    parts[parameter] = Part(shape, unit, dims[0] if dims else None, split)
        finally:
            if not all(mesh.ndim == 1 for mesh in meshes):
                module.reshard()
    missing = [n for n, p in root.named_parameters() if p.requires_grad and p not in parts]
    if missing:
        raise ValueError(
            f"fully_shard was told to ignore {', '.join(missing[:5])}, which nothing synchronises: "
            "shard or freeze them"
        )
    largest = max(mesh.ndim for mesh in data)
    meshes = [mesh for mesh in data if mesh.ndim == largest]
    if len(meshes) > 1:
        raise ValueError(
            f"parts of the model are sharded over different meshes ({meshes}): private training "
            "takes one"
        )
    sharding = _joined(
        "FSDP2 (fully_shard)", meshes[0], data[meshes[0]], tensor, parts, tuple(gathering)
    )
    return replace(sharding, managed=root)


def _units(root: nn.Module) -> list[tuple[Any, dict[Parameter, str]]]:
    """Each module that FSDP manages, with the parameters that it gathers and their names in it."""
    found = []
    taken: set[Parameter] = set()
    modules = [m for m in root.modules() if isinstance(m, FSDPModule)]
    for module in reversed(modules):  # inner ones first: what they manage is not the outer ones'
        own = {p: n for n, p in module.named_parameters() if p not in taken and is_sharded(p)}
        taken.update(own)
        if own:
            found.append((module, own))
    return found[::-1]


def _joined(
    api: str, mesh: DeviceMesh, axes: int, tensor: set[DeviceMesh], parts: dict[Parameter, Part],
    gathering: tuple[Gathering, ...],
) -> Sharding:  # fmt: skip
    """Groups of a mesh whose first `axes` dimensions are data axes, the others tensor's."""
    if len(tensor) > 1 or any(one.ndim > 1 for one in tensor):
        raise ValueError(
            f"the model's parameters are split over several tensor-parallel meshes ({tensor}): "
            "private training takes one, with one axis"
        )
    if axes > 2:
        raise ValueError(
            f"{api} over a mesh of {axes} data axes: private training takes one or two"
        )
    tensor_group = next(iter(tensor)).get_group() if tensor else None
    ranks = mesh.mesh
    place = mesh.get_coordinate()
    inner = tuple(place[axes:])
    data_ranks = ranks[(slice(None),) * axes + inner].flatten().tolist()
    replicas = mesh.get_group(0) if axes == 2 else None
    shards = mesh.get_group(axes - 1)
    data_group = shards if axes == 1 else _group(data_ranks)
    everyone = data_group if tensor_group is None else _group(ranks.flatten().tolist())
    return Sharding(
        api + (" x tensor parallel" if tensor else ""), data_group, tensor_group, everyone,
        replicas, shards, parts, gathering,
    )  # fmt: skip


def _of_tensor_parallel(module: nn.Module, data_group: dist.ProcessGroup | None) -> Sharding:
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    if len(meshes) > 1 or next(iter(meshes)).ndim > 1:
        raise ValueError(
            f"the model's parameters are DTensors on {len(meshes)} meshes ({meshes}) and not "
            "managed by fully_shard: private training takes one tensor-parallel mesh of one axis"
        )
    mesh = next(iter(meshes))
    parts = {
        p: Part(
            local(p).shape, number // UNIT,
            split=is_sharded(p) and any(q.is_shard() for q in p.placements),
        )
        for number, p in enumerate(p for p in module.parameters() if p.requires_grad)
    }  # fmt: skip
    group = mesh.get_group()
    everyone = group
    if data_group is not None:
        everyone = dist.group.WORLD
        if dist.get_world_size() != size_of(data_group) * size_of(group):
            raise ValueError(
                f"{size_of(data_group)} data-parallel x {size_of(group)} tensor-parallel ranks are "
                f"not the {dist.get_world_size()} of the world: private training takes all of them"
            )
    if data_group is not None:
        with torch.no_grad():
            for x in (*module.parameters(), *module.buffers()):
                dist.broadcast(local(x), group=data_group, group_src=0)
    return Sharding("tensor parallel", data_group, group, everyone, None, data_group, parts)


def _group(ranks: list[int]) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(sorted(ranks), use_local_synchronization=True)


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
