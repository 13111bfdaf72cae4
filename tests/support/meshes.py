"""Meshes of the shared ranks, whose process groups are made once.

A process group of gloo keeps a thread that wakes up a hundred times a second for as long as its
process lives. A mesh for each test would leave hundreds of them to the tests that follow.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

RANKS = 4  # making a group is a collective of the whole pool


@cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """This rank's mesh of all four ranks, as `init_device_mesh("cpu", sizes)` lays them out."""
    ranks = torch.arange(RANKS).view(sizes)
    groups = [_group(_rows(ranks.movedim(dim, -1))) for dim in range(ranks.dim())]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)


def square(*names: str) -> DeviceMesh:
    """This rank's mesh of two by two ranks."""
    return mesh_of((2, 2), names)


def _rows(ranks: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(map(tuple, ranks.reshape(-1, ranks.shape[-1]).tolist())))


@cache
def _group(rows: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    """Of several groups next to each other, the one with this rank."""
    made = [dist.new_group(row) for row in rows]
    return next(g for g, row in zip(made, rows, strict=True) if dist.get_rank() in row)
