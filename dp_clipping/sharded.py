"""Sharded models: which ranks share what, and how clipped sums find their shards.

| axis of the mesh | samples on its ranks | a parameter on its ranks |
| --- | --- | --- |
| data (FSDP's) | different | shards; gathered to be whole wherever a layer computes |
| tensor parallel | the same | parts, each computed with where it lies; or replicated |

FSDP2's own machinery never meets a gradient here: a captured layer hands its parameters none, so
nothing is accumulated and nothing is reduce-scattered behind a norm pass, whichever the mode. When
a clipped sum is final it is summed over the data axis into its shards by our own collective, one
module that FSDP manages after the other, in float32 whatever the mixed-precision policy says,
while the next sums are formed (Rajbhandari et al. 2020, arXiv:1910.02054, for sharding; Zhao et al.
2023, arXiv:2304.11277, for FSDP).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.profiler import record_function

from dp_clipping.collectives import all_reduce_together, reduce_scatter_together
from dp_clipping.shards import Place, place_of

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Shard

LOG = logging.getLogger(__name__)
UNIT = 8  # parameters that are handled together where no FSDP module says so
IN_FLIGHT = 2  # units whose sums may be on the wire while the next are formed


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return x.to_local() if dist.is_available() and isinstance(x, DTensor) else x


def is_sharded(x: Tensor) -> bool:
    return dist.is_available() and isinstance(x, DTensor)


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
            from dp_clipping import fsdp1

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

    @property
    def counts_replicated(self) -> bool:
        """Whether this rank adds the norms of parameters that its tensor-parallel axis shares."""
        return self.tensor_group is None or dist.get_rank(self.tensor_group) == 0

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
        return ShardedSums(self)

    def place_of(self, parameter: Parameter) -> Place | None:
        """Where this rank's part of a parameter lies; None: it has all of it."""
        return place_of(parameter)

    def backward(self) -> AbstractContextManager:
        """Around every backward, each of the two of a two-pass mode."""
        return nullcontext()

    def entered(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """Called in private forwards when one of `gathering` has gathered its parameters."""

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
        data, tensor = _size(self.data_group), _size(self.tensor_group)
        axes = f"{data} data-parallel" + (f" x {tensor} tensor-parallel" if tensor > 1 else "")
        return f"{self.api}: {axes} ranks; gradients are synchronised by dp_clipping alone"


def _size(group: dist.ProcessGroup | None) -> int:
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
        if dist.get_world_size() != _size(data_group) * _size(group):
            raise ValueError(
                f"{_size(data_group)} data-parallel x {_size(group)} tensor-parallel ranks are not "
                f"the {dist.get_world_size()} of the world: private training takes all of them"
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


def attribute(module: nn.Module, name: str) -> Tensor:
    """A module's parameter by its name, whatever stands there now."""
    *path, last = name.split(".")
    for child in path:
        module = getattr(module, child)
    return getattr(module, last)


class ShardedSums:
    """Takes whole clipped sums, leaves `.grad` of each parameter: its shard of the sum over ranks.

    All ranks issue the same collectives in the same order, whatever order sums come in: units
    from the last to the first, each when all of its sums are there. Large sums that divide evenly
    go as they are, the others of a unit packed into one.
    """

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self._order = sorted(sharding.units, reverse=True)
        self._waiting: dict[int, dict[Parameter, Tensor]] = {}
        self._next = 0
        self._flying: list[list[Transfer]] = []
        self._left: dict[Parameter, tuple[int, int]] = {}  # address and version of `.grad`

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        for transfers in self._flying:
            for transfer in transfers:
                transfer.work.wait()
        self._waiting, self._next, self._flying = {}, 0, []
        self._left.clear()

    @torch.no_grad()
    def changed(self) -> list[Parameter]:
        """Parameters whose `.grad` is not as it was left: FSDP adds to it without a word."""
        return [
            p
            for p in self.sharding.parts
            if p.grad is not None and self._left.get(p) != _state(p.grad)
        ]

    def receive(self, parameter: Parameter, total: Tensor) -> None:
        """Of all samples of this rank, in the shape that layers compute with."""
        unit = self.sharding.parts[parameter].unit
        self._waiting.setdefault(unit, {})[parameter] = total
        while self._next < len(self._order) and self._is_complete(self._order[self._next]):
            unit = self._order[self._next]
            self._next += 1
            with self._range():
                self._launch(self.sharding.units[unit], self._waiting.pop(unit))
                if len(self._flying) > IN_FLIGHT:
                    self._land(self._flying.pop(0))
        if self._next == len(self._order):  # the next microbatch begins anew
            self._next = 0

    def finish(self) -> None:
        """All sums of the step are in `.grad` (for what the current stream does next).

        Raises:
            RuntimeError: some parameters have no sum, as after an error half-way.
        """
        while self._flying:
            with self._range():
                self._land(self._flying.pop(0))
        if self._next or self._waiting:
            raise RuntimeError("sums of some parameters have not arrived: was a backward cut off?")

    def _range(self) -> AbstractContextManager:
        """What a trace calls it, where sums travel."""
        travels = _size(self.sharding.shards) > 1
        return record_function("reduce_scatter") if travels else nullcontext()

    def _is_complete(self, unit: int) -> bool:
        return len(self._waiting.get(unit, ())) == len(self.sharding.units[unit])

    def _launch(self, parameters: list[Parameter], totals: dict[Parameter, Tensor]) -> None:
        """One collective for all sums of a unit that have one dtype."""
        world = _size(self.sharding.shards)
        transfers: list[Transfer] = []
        alike: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
        for parameter in reversed(parameters):
            totals[parameter] = total = totals[parameter].contiguous()
            if world == 1:
                transfers.append(Transfer(Done(), [(parameter, total)]))
            else:
                is_sharded = self.sharding.parts[parameter].dim is not None
                alike.setdefault((total.dtype, is_sharded), []).append(parameter)
        for (_, is_sharded), mine in alike.items():
            start = self._scatter if is_sharded else self._reduce
            transfers.append(start({p: totals[p] for p in mine}))
        totals.clear()
        self._flying.append(transfers)

    def _reduce(self, totals: dict[Parameter, Tensor]) -> Transfer:
        """What is not sharded over the data axis: every rank keeps the sum."""
        work = all_reduce_together(list(totals.values()), self.sharding.shards)
        return Transfer(work, list(totals.items()))

    def _scatter(self, totals: dict[Parameter, Tensor]) -> Transfer:
        """Sums that divide evenly go as they are, the others packed into one."""
        world, parts = _size(self.sharding.shards), self.sharding.parts
        uneven = {}
        shards, sent, received = [], [], []
        for parameter, total in totals.items():
            if parts[parameter].dim or not total.numel() or total.shape[0] % world:
                uneven[parameter] = total
                continue
            shard = total.new_empty(total.shape[0] // world, *total.shape[1:])
            shards.append((parameter, shard))
            sent.append(total)
            received.append(shard)
        if uneven:
            rows, row, pieces = self._pack(uneven)
            shards += pieces
            sent.append(rows.view(-1))
            received.append(row)
        work = reduce_scatter_together(received, sent, self.sharding.shards)
        return Transfer(work, shards, sent)

    def _pack(
        self, totals: dict[Parameter, Tensor]
    ) -> tuple[Tensor, Tensor, list[tuple[Parameter, Tensor]]]:
        """Shards side by side, padded: row r of [ranks, n] goes to rank r; the row [n] that this
        rank gets; what that has of each parameter."""
        group, parts = self.sharding.shards, self.sharding.parts
        world, rank = _size(group), dist.get_rank(group)
        widths = []
        for p, total in totals.items():
            shape = list(total.shape)
            shape[parts[p].dim] = math.ceil(shape[parts[p].dim] / world)
            widths.append(math.prod(shape))
        rows = next(iter(totals.values())).new_zeros(world, sum(widths))
        first = 0
        shapes = []
        for (p, total), width in zip(totals.items(), widths, strict=True):
            pieces = _pieces(total, world, parts[p].dim)
            shapes.append(pieces[rank].shape)
            for row, piece in enumerate(pieces):
                rows[row, first : first + piece.numel()] = piece.reshape(-1)
            first += width
        row = torch.empty_like(rows[0])
        shards = [
            (p, column[: math.prod(shape)].view(shape))
            for p, column, shape in zip(totals, row.split(widths), shapes, strict=True)
        ]
        return rows, row, shards

    @torch.no_grad()
    def _land(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            transfer.work.wait()
            transfer.sent.clear()
            replicas, shards = self.sharding.replicas, [x for _, x in transfer.shards if x.numel()]
            if replicas is not None and shards:
                all_reduce_together(shards, replicas).wait()
            for parameter, shard in transfer.shards:
                self._add(parameter, shard)
            # Packed ones share a version: when all are done.
            self._note(parameter for parameter, _ in transfer.shards)

    def _note(self, parameters: Iterable[Parameter]) -> None:
        """Their `.grad` is final, as far as it has come."""
        for parameter in parameters:
            self._left[parameter] = _state(parameter.grad)

    def _add(self, parameter: Parameter, shard: Tensor) -> None:
        if parameter.grad is not None:
            local(parameter.grad).add_(shard)
        else:
            parameter.grad = self.sharding.like(parameter, shard.view(local(parameter).shape))


@dataclass
class Transfer:
    """A collective under way: what it fills, for which parameters, and from what."""

    work: Any
    shards: list[tuple[Parameter, Tensor]]
    sent: list[Tensor] = field(default_factory=list)


class Done:
    """Work that nothing has to be waited for."""

    def wait(self) -> None:
        """At once."""


def _state(gradient: Tensor) -> tuple[int, int]:
    part = local(gradient)
    return part.data_ptr(), part._version


def _pieces(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """`torch.chunk`, with the empty ones at the end that it leaves out."""
    found = list(x.chunk(count, dim))
    empty = x.narrow(dim, 0, 0)
    return found + [empty] * (count - len(found))
