"""Computes where a rank's part of a parameter lies in the whole.

Every layout that FSDP and tensor parallel make is a box: along each dimension of the parameter an
interval, which `box_of` gives. In row-major order of the whole a box is a few affine patterns:

| layout of [d, p] over W ranks | its spans |
| --- | --- |
| whole, replicated | one of d·p elements |
| Shard(0) | one of d/W·p elements |
| Shard(1) | one: d times p/W elements, p apart |
| Shard(0) and Shard(1) on two axes | one: d/W times p/W elements, p apart |

With more dimensions a box may take several spans, one for each row of what lies further out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.distributed.dtensor import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

Box = tuple[tuple[int, int], ...]
"""(start, length) along each dimension."""


@dataclass(frozen=True)
class Span:
    """A regular run of elements of a part, and where they are in the whole.

    Element local_start + q·length + r of the part is element offset + q·stride + r of the whole,
    for q < count and r < length, both counted in row-major order.
    """

    local_start: int
    offset: int
    length: int
    stride: int
    count: int

    @property
    def numel(self) -> int:
        return self.length * self.count


Place = tuple[Span, ...]
"""Spans of one part, in its own order and without gaps; () if the part is empty."""

Piece = tuple[Parameter, int, int, Tensor]
"""A parameter, the first element of a run of it (flattened), its length, and its gradient."""


def place_of(parameter: Tensor) -> Place | None:
    """Returns the spans of this rank's part; None if it has all of the parameter."""
    if not is_sharded(parameter):
        return None
    box, whole = box_of(parameter), tuple(parameter.shape)
    return None if box == tuple((0, n) for n in whole) else spans_of(box, whole)


def slices_of(parameter: Tensor) -> tuple[slice, ...]:
    """Returns slices with which `whole[slices]` is this rank's part."""
    return tuple(slice(start, start + length) for start, length in box_of(parameter))


def box_of(parameter: Tensor) -> Box:
    """Returns the range of this rank's part along each dimension.

    Raises:
        ValueError: for a placement that is not one of a parameter, such as a partial sum.
        RuntimeError: for a layout that this version of torch makes otherwise than is known here.
    """
    whole = tuple(parameter.shape)
    if not is_sharded(parameter):
        return tuple((0, n) for n in whole)
    sharded: Any = parameter
    mesh: DeviceMesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    local = sharded.to_local().shape
    if coordinate is None:
        return tuple((n, 0) for n in whole)
    box = _box(whole, tuple(mesh.shape), tuple(coordinate), tuple(sharded.placements))
    expected = torch.Size(length for _, length in box)
    if expected != local and not expected.numel() == local.numel() == 0:
        raise RuntimeError(
            f"torch {torch.__version__} gives this rank {list(local)} of a parameter "
            f"{list(whole)} placed as {list(sharded.placements)}, where {list(expected)} was "
            "expected: this layout is not supported"
        )
    return box


def spans_of(box: Box, whole: Sequence[int]) -> Place:
    """Returns the spans of a box in a tensor of that shape.

    The innermost dimension that is cut makes the rows; those further out repeat them. Rows one
    stride apart are one span, as far out as the dimensions between are whole.
    """
    numel = math.prod(length for _, length in box)
    if numel == 0:
        return ()
    strides = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    cut = [i for i, (_, length) in enumerate(box) if length < whole[i]]
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    if not cut or math.prod(length for _, length in box[: cut[-1]]) == 1:
        return (Span(0, first, numel, numel, 1),)
    inner = cut[-1]
    # Dimensions between `outer` and `inner` are whole: their rows are equally far apart.
    outer = max((i for i in cut if i < inner), default=0)
    length, stride = box[inner][1] * strides[inner], whole[inner] * strides[inner]
    count = math.prod(box[i][1] for i in range(outer, inner))
    steps = product(*(range(0, box[i][1] * strides[i], strides[i]) for i in range(outer)))
    return tuple(
        Span(i * length * count, first + sum(step), length, stride, count)
        for i, step in enumerate(steps)
    )


@lru_cache(maxsize=4096)
def _box(
    whole: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> Box:  # fmt: skip
    box = [(0, n) for n in whole]
    for dim in range(len(whole)):
        for axis in _cuts(dim, mesh, placements):
            start, length = box[dim]
            piece = -(-length // mesh[axis])  # as `torch.chunk` cuts: the last pieces are smaller
            before = min(piece * coordinate[axis], length)
            box[dim] = start + before, min(piece, length - before)
    return tuple(box)


def _cuts(dim: int, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> list[int]:
    """Returns the mesh axes that cut a dimension, in the order in which they cut.

    From left to right, but for strided shards: with split factor f, such an axis cuts after later
    ones of f pieces together. FSDP2 shards so what tensor parallel has cut before it.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        of_axis, factor = _shard_of(placements[axis])
        if of_axis != dim:
            continue
        pieces = [math.prod(mesh[a] for a in order[:i]) for i in range(len(order) + 1)]
        if factor not in pieces:
            raise RuntimeError(
                f"torch {torch.__version__} has placed a parameter as {list(placements)} on a mesh "
                f"{list(mesh)}: this order of shards is not supported"
            )
        order.insert(pieces.index(factor), axis)
    return order


def _shard_of(placement: Placement) -> tuple[int | None, int]:
    """Returns the dimension that a placement shards, None if replicated, and its split factor."""
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Replicate):
        return None, 1
    if type(placement).__name__ == "_StridedShard":
        return placement.dim, int(placement.split_factor)  # type: ignore[attr-defined]
    if type(placement) is Shard:
        return placement.dim, 1
    raise ValueError(f"a parameter placed as {placement!r} is not supported: shard or replicate it")
