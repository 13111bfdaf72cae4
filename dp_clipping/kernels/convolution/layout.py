"""Lays out the operands of a convolution as those of linear layers, one for each tap.

    G_i[:, k] = Σ_r y_i[r] ⊗ x_i[r + place(k)]

r runs over all places of the grid up to the last position, so y ends there. At places that are no
position it is zero. Taps of one run are neighbouring rows of x, so they are one view, whose rows
overlap. All runs are one entry of a launch (`pair_of`), with the places where they start. A group
of channels is a sample of its own there, and of several pictures of a sample one lies behind the
other.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.kernels.convolution.geometry import (
    ONE,
    Geometry,
    Grid,
    Layout,
    Packed,
    Target,
    grid_of,
    runs_of,
)
from dp_clipping.kernels.launch.grouped_launch import Pair
from dp_clipping.kernels.launch.tiles import ALIGNMENT, ceil_div

FEW = 8  # input channels, below which those under the taps of a row are packed as channels


@lru_cache(maxsize=1024)
def layout_of(
    x: torch.Size, y: torch.Size, itemsize: int, pictures: int, geometry: Geometry
) -> Layout:
    """Returns the layout for operands of such shapes.

    Args:
        x, y: of [N, C, D, H, W] and [N, O, ..].
        itemsize: bytes of an element of packed operands.
        pictures: of a sample.
    """
    groups, positions = geometry.groups, (y[2], y[3], y[4])
    inputs, outputs = x[1] // groups, y[1] // groups
    channels, folds = inputs, groups == 1 and inputs < FEW and geometry.taps[2] > 1
    if folds:
        channels *= geometry.taps[2]
        geometry = Geometry(
            (*geometry.taps[:2], 1), (*geometry.stride[:2], 1), (*geometry.padding[:2], 0),
            (*geometry.dilation[:2], 1), 1,
        )  # fmt: skip
    grid = grid_of(geometry, positions)
    each = ALIGNMENT // itemsize  # so that the bulk copy engine takes rows
    wide_x, wide_y = (ceil_div(n, each) * each for n in (channels, outputs))
    to_x = Target(pictures, groups, wide_x, grid, geometry.padding, geometry.stride)
    to_y = Target(
        pictures, groups, wide_y, Grid(ONE, grid.sizes), rows=grid.rows(pictures, positions)
    )
    taps, places = runs_of(geometry, grid, pictures)
    return Layout(
        geometry, folds, positions, inputs, outputs, to_x, to_y, taps,
        tuple([place * wide_x for place in places]),
    )  # fmt: skip


def folded(x: Tensor, geometry: Geometry, layout: Layout) -> Tensor:
    """Returns [N, C · taps, D, H, positions]: the pixels under the taps of a row as channels."""
    padding, stride, dilation = geometry.padding[2], geometry.stride[2], geometry.dilation[2]
    x = F.pad(x, (padding, padding)) if padding else x
    x = x.unfold(4, (geometry.taps[2] - 1) * dilation + 1, stride)[..., ::dilation]
    return x.narrow(4, 0, layout.positions[2]).movedim(5, 2).flatten(1, 2)


def pair_of(packed: Packed, layout: Layout) -> Pair:
    """Returns y [B · groups, T, O] and x [B · groups, T, taps · C], with the places of all runs."""
    x, y, _ = packed
    shape = x.shape[0], y.shape[1], layout.taps * layout.to_x.width
    strides = x.stride(0), layout.to_x.width, 1
    return y, x.as_strided(shape, strides), layout.places


def pairs_of_groups(pair: Pair, layout: Layout) -> list[Pair]:
    """Returns y [B, T, O] and x [B, T, taps · C] of each group, with the places of all runs."""
    groups = layout.geometry.groups
    y, x = pair[:2]
    return [(y[group::groups], x[group::groups], layout.places) for group in range(groups)]


def memory_of_gradients(like: Tensor, layout: Layout, samples: int, dtype: torch.dtype) -> Tensor:
    """Returns memory for G, [B · groups, runs, O, taps · C], on the device of `like`."""
    rows, columns = samples * layout.geometry.groups, layout.taps * layout.to_x.width
    return like.new_empty(rows, len(layout.places), layout.to_y.width, columns, dtype=dtype)


def weight_of(totals: list[Tensor], layout: Layout, shape: torch.Size) -> Tensor:
    """Returns a sum in the parameter's shape [O, C / groups, *taps].

    Args:
        totals: [groups, runs, O, taps · C], or of each group [runs, O, taps · C].
    """
    found = totals[0] if len(totals) == 1 else torch.stack(totals)
    sizes = layout.geometry.groups, -1, layout.to_y.width, layout.taps, layout.to_x.width
    found = found.view(sizes).permute(0, 2, 4, 1, 3)[:, : layout.outputs]
    if layout.folds:  # [1, O, C · columns, rows, 1]
        columns = shape[-1]
        found = found[:, :, : layout.inputs * columns]
        found = found.unflatten(2, (layout.inputs, columns)).movedim(3, -1)
    else:
        found = found[:, :, : layout.inputs]
    return found.reshape(shape)
