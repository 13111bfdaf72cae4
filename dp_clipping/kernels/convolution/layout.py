"""Lays out the operands of a convolution as those of linear layers, one for each tap.

    G_i[:, k] = Σ_r y_i[r] ⊗ x_i[r + place(k)]

r runs over all places of the grid up to the last position, so y ends there. At places that are no
position it is zero. Taps of one run are neighbouring rows of x, so they are one view, whose rows
overlap. All runs are one entry of a launch (`pair_of`), with the places where they start. A group
of channels is a sample of its own there, and of several pictures of a sample one lies behind the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import ACCUMULATED, full_float32
from dp_clipping.kernels.convolution.geometry import (
    ONE,
    Geometry,
    Grid,
    Layout,
    Packed,
    Target,
    gradients_plain,
    grid_of,
    runs_of,
)
from dp_clipping.kernels.convolution.packing import largest_of, pack
from dp_clipping.kernels.launch.grouped_launch import Pair
from dp_clipping.kernels.launch.tiles import ALIGNMENT, ceil_div

CHUNK_ELEMENTS = 1 << 25  # of patches that are formed at a time
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


def dense_gradients(
    x: Tensor, y: Tensor, shape: torch.Size, geometry: Geometry, batch_size: int
) -> Tensor:
    """Returns G [B, *shape] in `accumulation_dtype(dtype)`; some patches are formed at a time.

    Args:
        x, y: as `gradients_plain` takes them.
        shape: of the parameter.
    """
    rows, dtype = x.shape[0], ACCUMULATED.get(y.dtype, torch.float32)
    pictures = rows // max(1, batch_size)
    each = max(1, pictures * prod(y.shape[2:]) * x.shape[1] * prod(geometry.taps))
    step = max(1, CHUNK_ELEMENTS // each) * max(1, pictures)
    if not batch_size:
        return y.new_zeros(0, *shape, dtype=dtype)
    with full_float32():
        found = [
            gradients_plain(own_x.to(dtype), own_y.to(dtype), geometry, own_x.shape[0] // pictures)
            for own_x, own_y in zip(x.split(step), y.split(step), strict=True)
        ]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole.view(batch_size, *shape)


class ConvolutionFactors:
    """Factors of one use: x [N, C, ..] and y [N, O, ..], N a multiple of B; G is [B, *shape].

    `factors.take_norms` packs them for the kernels of linear layers, as `pack_whole` does.

    Args:
        x, y: in three dimensions, in float32, bfloat16 or float16. Of a transposed convolution the
            outputs are x.
        rounds: kernels may round float32 to 11 bits, as TensorFloat-32 does; else
            `torch.backends.cudnn.conv` says so.

    Attributes:
        layout: of packed operands, whose dtype is `dtype`.
        values: the tensors of which the sum will be formed: x and y, later packed operands.
        scale: [B] float32, by which gradients and products of `values` are multiplied, or None.
        pair: packed operands as those of linear layers, groups as samples, or None.
        summands: the same with one entry of each group.
        gradients: G [B, groups, runs, O, taps · C], kept in place of operands, or None.
    """

    held = attrgetter("values")

    def __init__(
        self, x: Tensor, y: Tensor, shape: torch.Size, batch_size: int, geometry: Geometry,
        rounds: bool = False,
    ):  # fmt: skip
        self.shape, self.batch_size, self.geometry = shape, batch_size, geometry
        cudnn: Any = torch.backends.cudnn
        wide = x.dtype == torch.float32
        self.tf32 = wide and (rounds or cudnn.conv.fp32_precision == "tf32")
        self.dtype = torch.float16 if self.tf32 else x.dtype
        pictures = max(1, x.shape[0] // max(1, batch_size))
        self.layout = layout_of(x.shape, y.shape, self.dtype.itemsize, pictures, geometry)
        self.values: tuple[Tensor, ...] = (x, y)  # packed, they may be the layer's own
        self.scale: Tensor | None = None
        self.pair: Pair | None = None
        self.summands: list[Pair] = []
        self.gradients: Tensor | None = None

    def dense(self) -> Tensor:
        """Returns G [B, *shape] by PyTorch."""
        x, y = self.values
        return dense_gradients(x, y, self.shape, self.geometry, self.batch_size)

    def on_kernels(self) -> ConvolutionFactors:
        """Returns itself, which is packed with others."""
        return self

    @property
    def y(self) -> Tensor:
        """Returns a tensor of the dtype of output gradients."""
        return self.values[1]

    def keep(self, gradients: Tensor) -> None:
        """Keeps G [B · groups, ..] in place of the operands."""
        self.values, self.pair, self.summands = (), None, []
        self.gradients = gradients.view(self.batch_size, self.geometry.groups, *gradients.shape[1:])


def pack_whole(uses: Sequence[ConvolutionFactors]) -> None:
    """Packs all samples of the uses that are not packed yet, in place of their x and y."""
    uses = [use for use in uses if use.pair is None and use.gradients is None]
    scaled: list[ConvolutionFactors] = []
    for use in uses:
        (x, y), layout = use.values, use.layout
        if layout.folds:
            use.values = folded(x, use.geometry, layout), y
        if use.tf32 and x.numel() and y.numel():
            scaled.append(use)
    largest: dict[ConvolutionFactors, Sequence[Tensor]] = {}
    if scaled:
        found = largest_of([x for use in scaled for x in use.values], scaled[0].batch_size)
        largest = dict(zip(scaled, zip(found[::2], found[1::2], strict=True), strict=True))
    for use in uses:
        (x, y), layout = use.values, use.layout
        use.values = ()
        packed = pack(x, y, layout.to_x, layout.to_y, use.tf32, largest.get(use, ()))
        del x, y
        use.values, use.scale, use.pair = packed[:2], packed[2], pair_of(packed, layout)
        is_one = use.geometry.groups == 1
        use.summands = [use.pair] if is_one else pairs_of_groups(use.pair, layout)
