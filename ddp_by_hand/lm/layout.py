"""How ranks share samples and parameters: a data axis, a tensor axis, or both on a mesh.

It needs no import that takes long, as `lm.parallel` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA, TENSOR = "data", "tensor"  # names of a mesh's axes


@dataclass(frozen=True)
class Layout:
    """A layout of ranks.

    Attributes:
        tensor_ranks: ranks that share samples; None: all.
        wrap: what FSDP2 gathers together, see `lm.parallel.shard_fully`; None: no FSDP2.
    """

    tensor_ranks: int | None = 1
    wrap: str | None = None

    @property
    def splits_tensors(self) -> bool:
        return self.tensor_ranks != 1

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Returns the numbers of ranks of the data axis and of the tensor axis."""
        tensor = self.tensor_ranks or world_size
        return world_size // tensor, tensor

    def describe(self, world_size: int) -> str:
        data, tensor = self.sizes(world_size)
        return f"{data} data x {tensor} tensor-parallel ranks, which share a batch"

    def data_place(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns (index of this rank's batch, batches); ranks of a tensor axis share one."""
        data, tensor = self.sizes(world_size)
        return rank // tensor, data

    def check(self, world_size: int, make: Callable[[], nn.Module]) -> None:
        """Raises ValueError if so many ranks cannot share the network that `make` returns."""
        if not self.splits_tensors:
            return
        data, tensor = self.sizes(world_size)
        if self.wrap and (data < 2 or data * tensor != world_size):
            raise ValueError(
                f"the mesh has {tensor} ranks on the tensor axis and two or more on the data axis, "
                f"start {2 * tensor} ranks or another multiple of {tensor}"
            )
        from ddp_by_hand.lm.parallel import plan_of

        with torch.device("meta"):
            network = make()
        plan_of(network, tensor)


@functools.cache  # each new mesh makes new process groups
def mesh_of(layout: Layout, world_size: int, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    data, tensor = layout.sizes(world_size)
    axes = {DATA: data} if layout.wrap else {}
    axes |= {TENSOR: tensor} if layout.splits_tensors else {}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def whole(x: Tensor) -> Tensor:
    """Returns all of a `DTensor` (call it on all ranks), or another tensor unchanged."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
