"""Lays out the operands of a convolution as those of linear layers, one for each tap.

    G_i[:, k] = Σ_r y_i[r] ⊗ x_i[r + place(k)]

r runs over all places of the grid up to the last position. At places that are no position y is
zero. Taps of one run are neighbouring rows of x, so they are one view, whose rows overlap:
`pairs_of` returns these for the kernels of linear layers. A group of channels is a sample of its
own there, and of several pictures of a sample one lies behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.kernels.convolution.geometry import (
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
    to_y = Target(pictures, groups, wide_y, Grid((1, 1, 1), grid.sizes))
    runs = runs_of(geometry, grid, pictures)
    taps = [tap for run in runs for tap in run.taps]
    order = sorted(range(len(taps)), key=taps.__getitem__)
    return Layout(
        geometry, folds, positions, inputs, outputs, to_x, to_y, runs,
        () if order == sorted(order) else tuple(order), grid.rows(pictures, positions),
    )  # fmt: skip


def folded(x: Tensor, geometry: Geometry, layout: Layout) -> Tensor:
    """Returns [N, C · taps, D, H, positions]: the pixels under the taps of a row as channels."""
    padding, stride, dilation = geometry.padding[2], geometry.stride[2], geometry.dilation[2]
    x = F.pad(x, (padding, padding)) if padding else x
    x = x.unfold(4, (geometry.taps[2] - 1) * dilation + 1, stride)[..., ::dilation]
    return x.narrow(4, 0, layout.positions[2]).movedim(5, 2).flatten(1, 2)


def pairs_of(packed: Packed, layout: Layout) -> list[Pair]:
    """Returns y [B · groups, T, O] and x [B · groups, T, taps · C] of each run."""
    x, y, _ = packed
    width, start, rows = layout.to_x.width, x.storage_offset(), layout.rows
    y, samples, strides = y[:, :rows], x.shape[0], (x.stride(0), width, 1)
    pairs = []
    for place, taps in layout.runs:
        shape = samples, rows, len(taps) * width
        pairs.append((y, x.as_strided(shape, strides, start + place * width)))
    return pairs


def pairs_of_groups(pairs: Sequence[Pair], groups: int) -> list[Pair]:
    """Returns y [B, T, O] and x [B, T, taps · C] of each run's groups."""
    return [
        (y[group::groups], x[group::groups]) for y, x in pairs for group in range(groups)
    ]  # fmt: skip


def memory_of_gradients(
    like: Tensor, layout: Layout, samples: int, dtype: torch.dtype
) -> list[Tensor]:
    """Returns memory for G of each run, [B · groups, O, taps · C], on the device of `like`."""
    rows, width = samples * layout.geometry.groups, layout.to_x.width
    return [
        like.new_empty(rows, layout.to_y.width, len(run.taps) * width, dtype=dtype)
        for run in layout.runs
    ]  # fmt: skip


def weight_of(totals: Sequence[Tensor], layout: Layout, shape: torch.Size) -> Tensor:
    """Returns a sum in the parameter's shape [O, C / groups, *taps].

    Args:
        totals: of each run [groups · O, taps · C], or of each run and group [O, taps · C].
    """
    width, outputs, groups = layout.to_x.width, layout.to_y.width, layout.geometry.groups
    if len(totals) > len(layout.runs):
        firsts = range(0, len(totals), groups)
        totals = [torch.stack(list(totals[first : first + groups])) for first in firsts]
    own: list[Tensor] = []  # of each tap, [groups, O, C]
    for total, run in zip(totals, layout.runs, strict=True):
        own += total.view(-1, outputs, len(run.taps), width).unbind(2)
    if layout.order:
        own = [own[n] for n in layout.order]
    found = torch.stack(own, 3) if len(own) > 1 else own[0].unsqueeze(3)
    found = found[:, : layout.outputs]
    if layout.folds:
        found = found[:, :, : layout.inputs * shape[-1]]
        found = found.unflatten(2, (layout.inputs, shape[-1])).movedim(3, 4)
    else:
        found = found[:, :, : layout.inputs]
    return found.reshape(shape)
