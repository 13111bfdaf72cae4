"""Describes how a model is spread over ranks.

| axis of the mesh | samples on its ranks | a parameter on its ranks |
| --- | --- | --- |
| data (FSDP's) | different | shards; gathered to be whole wherever a layer computes |
| tensor parallel | the same | parts, each computed with where it lies; or replicated |

`detect.sharding_of` finds it; `gradient_reduce` takes clipped sums to their shards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from dp_clipping.distributed.dtensor import is_sharded, size_of
from dp_clipping.distributed.torch_compat import layout_of, with_layout


@dataclass(frozen=True)
class ParameterPart:
    """The part of a parameter that this rank computes with.

    Attributes:
        shape: the shape that layers compute with: of the parameter, or of its tensor-parallel part.
        unit: number of the FSDP module that gathers it; 0 where there is none.
        dim: dimension along which the data axis shards that; None: not sharded.
        split: it is a part, and other members of the tensor-parallel axis have the others.
    """

    shape: torch.Size
    unit: int = 0
    dim: int | None = None
    split: bool = False


Slice = tuple[int, int]
"""(start, length) of a rank's part of a flattened parameter."""

Gathering = tuple[nn.Module, dict[Parameter, str]]
"""A module, and the names in it of the trainable parameters that it gathers."""


def owned(modules: list[Any]) -> list[dict[Parameter, str]]:
    """Returns each module's parameters that are no inner module's, with their names there."""
    taken: set[Parameter] = set()
    found = []
    for module in reversed(modules):
        found.append({p: name for name, p in module.named_parameters() if p not in taken})
        taken.update(found[-1])
    return found[::-1]


@dataclass(frozen=True)
class Sharding:
    """How a model is spread over ranks. Immutable; made by `detect.sharding_of`.

    The engine takes the groups from it, the capture the modules that gather parameters, and
    `ShardedSums` the units. The model calls `backward`, `entered` and `recover` around its
    passes; FSDP1 overrides them.

    Attributes:
        api: what has sharded it, for messages.
        data_parallel_group: ranks with other samples and the same parts of parameters; None: no
            such axis.
        tensor_group: ranks with the same samples and other parts; None: no such axis.
        everyone: all ranks of both.
        replicas: those ranks of the data axis that hold the same shard (hybrid sharding).
        shards: those ranks of the data axis among which parameters are sharded.
        parts: trainable parameter -> its part.
        gathering: modules before whose forward whole parameters take the place of shards.
        gathered: modules in the network whose call gathers their parameters.
        managed: the root that FSDP2 manages.
        slices: of FSDP1, parameter -> what each rank of the data axis has of it, flattened; without
            those that every rank has (on one rank, and where FSDP1 was told to ignore them).
        by_wrapper: a `ddp` wrapper gathers the parameters and takes the sums to their owners.
    """

    api: str
    data_parallel_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    parts: dict[Parameter, ParameterPart] = field(repr=False)
    gathering: tuple[Gathering, ...] = field(repr=False, default=())
    managed: nn.Module | None = field(repr=False, default=None)
    slices: dict[Parameter, list[Slice]] = field(repr=False, default_factory=dict)
    by_wrapper: bool = False
    gathered: frozenset[nn.Module] = field(repr=False, default=frozenset())
    _layouts: dict[tuple[Tensor, torch.dtype], Any] = field(repr=False, default_factory=dict)

    @property
    def leaves_gradients(self) -> bool:
        """Returns whether a forward keeps `.grad` unchanged."""
        return True

    @cached_property
    def units(self) -> dict[int, list[Parameter]]:
        """Returns the number of an FSDP module -> its trainable parameters."""
        found: dict[int, list[Parameter]] = {}
        for parameter, part in self.parts.items():
            found.setdefault(part.unit, []).append(parameter)
        return found

    @cached_property
    def unit_bytes(self) -> dict[int, int]:
        """Returns the number of an FSDP module -> float32 bytes of trainable parameters, whole."""
        sizes = {
            p: p.numel() if is_sharded(p) else part.shape.numel() for p, part in self.parts.items()
        }
        return {unit: 4 * sum(sizes[p] for p in of_unit) for unit, of_unit in self.units.items()}

    @cached_property
    def bytes(self) -> int:
        """Returns the float32 bytes of all trainable parameters."""
        return sum(self.unit_bytes.values())

    def like(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Returns `part` with a parameter's layout, as a DTensor if the parameter is one.

        `DTensor.from_local` takes the host as long as several launches, so the layout that it found
        serves again.
        """
        if not is_sharded(parameter):
            return part
        layout = self._layouts.get((parameter, part.dtype))
        if layout is not None:
            return with_layout(part, layout)
        from torch.distributed.tensor import DTensor

        made = DTensor.from_local(
            part, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        self._layouts[parameter, part.dtype] = layout_of(made)
        return made

    def backward(self) -> AbstractContextManager:
        """Returns a context for every backward, each of the two of a two-pass mode."""
        return nullcontext()

    def entered(self, module: nn.Module, inputs: Callable[[], list[Tensor]]) -> None:
        """Called in a private forward when one of `gathering` has gathered its parameters."""

    def watch(self, note: Callable[[Parameter], None]) -> list[RemovableHandle]:
        """Registers `note` to be called with each parameter that autograd adds a gradient to.

        Where that is to something else than the parameter: FSDP2 runs the parameter's own hooks.
        """
        return []

    def stands_for(self, now: Tensor | None, before: Parameter) -> bool:
        """Returns whether FSDP has put `now` in a parameter's place: a gathered one, which is no
        DTensor, or one on the tensor-parallel mesh."""
        if now is None or self.managed is None:
            return False
        return not is_sharded(now) or now.device_mesh != before.device_mesh

    def recover(self) -> bool:
        """Cleans up after a pass that failed. Returns whether later passes are right.

        FSDP2 takes a root for gathered that a backward has left half-way, and would compute with
        old values; torch 2.13 has a way to tell it.
        """
        if self.managed is None:
            return True
        reset = getattr(self.managed, "reset_iter_state", None)
        if reset is not None:
            with suppress(AttributeError):  # before a root's first forward it has no state
                reset()
        return reset is not None

    def describe(self) -> str:
        data, tensor = size_of(self.data_parallel_group), size_of(self.tensor_group)
        axes = f"{data} data-parallel" + (f" x {tensor} tensor-parallel" if tensor > 1 else "")
        return f"{self.api}: {axes} ranks; gradients are synchronised by dp_clipping alone"
