"""Norms and sums of convolutions on the kernels of linear layers.

G is kept where it is smaller than x and y together; then not all samples need be packed at a time.
Elsewhere packed x and y are kept, and G_i is computed again for the sum. Where positions are few,
norms come from Gram matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import SUM_ROUNDING, stored_dtype
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels.convolution import gram, packing
from dp_clipping.kernels.convolution.geometry import Geometry, Layout, Packed
from dp_clipping.kernels.convolution.layout import (
    folded,
    layout_of,
    memory_of_gradients,
    pair_of,
    pairs_of_groups,
)
from dp_clipping.kernels.convolution.packing import pack
from dp_clipping.kernels.gradient import gradients_and_squares
from dp_clipping.kernels.launch.grouped_launch import Pair
from dp_clipping.kernels.launch.tiles import ceil_div

LEAST_PROGRAMS = 132  # of a launch, if samples are divided: fewer leave processors idle


class ConvolutionFactors:
    """Operands of one use, packed for the kernels of linear layers; see `take_norms`.

    Args:
        use: x and y, the parameter's shape and geometry, as `layers.convolution.Factors` has them.
        most: bytes that are packed at a time, if G is kept in their place.

    Attributes:
        shape: of the parameter.
        layout: of packed operands.
        samples: how many are packed at a time, if G is kept in their place; 0: it is larger.
        values: the packed operands' tensors, of which the sum will be formed.
        scale: [B] float32, by which gradients and products of `values` are multiplied, or None.
        pair: `values` as operands of linear layers, groups as samples, or None.
        summands: the same with one entry of each group.
        gradients: G [B, groups, runs, O, taps · C], or None.
    """

    held = attrgetter("values")

    def __init__(self, use: Any, most: int = packing.PACKED_BYTES):
        self.use = use
        self.shape, self._geometry, self.batch_size = use.shape, use.geometry, use.batch_size
        cudnn: Any = torch.backends.cudnn
        wide = use.x.dtype == torch.float32
        self._tf32 = wide and (use.rounds or cudnn.conv.fp32_precision == "tf32")
        self.dtype = torch.float16 if self._tf32 else use.x.dtype
        self.layout, self.samples = _plan_of(
            use.x.shape, use.y.shape, self.dtype, self.batch_size, use.geometry, most
        )
        self.values: tuple[Tensor, ...] = ()  # may be the layer's own
        self.scale: Tensor | None = None
        self.pair: Pair | None = None
        self.summands: list[Pair] = []
        self.gradients: Tensor | None = None

    def pack(self) -> Packed:
        """Packs all samples, in place of what they are packed from."""
        use, self.use = self.use, None
        layout, groups = self.layout, self._geometry.groups
        x = folded(use.x, self._geometry, layout) if layout.folds else use.x
        found = pack(x, use.y, layout.to_x, layout.to_y, self._tf32)
        self.values, self.scale, self.pair = found[:2], found.scale, pair_of(found, layout)
        self.summands = [self.pair] if groups == 1 else pairs_of_groups(self.pair, layout)
        return found

    def keep(self, gradients: Tensor) -> None:
        """Keeps G [B · groups, ..] in place of the operands."""
        self.values, self.pair, self.summands = (), None, []
        self.gradients = gradients.view(
            self.batch_size, self._geometry.groups, *gradients.shape[1:]
        )

    def take_norms_of_pieces(self) -> Tensor:
        """Returns squared norms [1, B · groups] and keeps G; pieces of the batch are packed."""
        size, layout, samples = self.batch_size, self.layout, self.samples
        pictures, groups = layout.to_x.pictures, self._geometry.groups
        use, self.use = self.use, None
        x, y = use.x, use.y
        del use
        gradients = memory_of_gradients(y, layout, size, stored_dtype(self.dtype))
        squares: list[Tensor] = []
        scales: list[Any] = []
        for first in range(0, size, samples):
            rows = slice(first * pictures, (first + samples) * pictures)
            own = gradients[first * groups : (first + samples) * groups]
            own_x = folded(x[rows], self._geometry, layout) if layout.folds else x[rows]
            piece = pack(own_x, y[rows], layout.to_x, layout.to_y, self._tf32)
            del own_x
            if first + samples >= size:
                del x, y  # nobody else may have them
            squares.append(gradients_and_squares([pair_of(piece, layout)], None, [own])[1])
            scales.append(piece.scale)
            del piece  # before others are packed
        if scales[0] is not None:
            self.scale = torch.cat(scales)
        self.keep(gradients)
        return torch.cat(squares, 1)


Rows = tuple[Sequence[int], Tensor, Tensor | None, float, float]
"""The numbers of some uses, their squared norms [n, B], and the rest as in `Norms.add_rows`."""


def take_norms(uses: Sequence[ConvolutionFactors], keep: bool) -> list[Rows]:
    """Returns norms of all uses; with `keep`, G is stored where it is smaller than operands.

    Few launches serve those that are packed at once.
    """
    found: list[Rows] = []
    together: dict[tuple[bool, bool, int], tuple[list, list, list[Pair]]] = {}
    for n, use in enumerate(uses):
        layout, stores = use.layout, keep and use.samples > 0
        if stores and use.samples < use.batch_size:
            squares = _of_samples([use], use.take_norms_of_pieces())
            found.append(((n,), squares, None, 0.0, 0.0))
            continue
        operands = use.pack()
        if not stores and gram.pays(layout, use.dtype.itemsize):
            squares, scales = gram.gram_squares(operands, layout)
            positions = layout.to_x.pictures * prod(layout.positions)
            error = positions * SUM_ROUNDING[torch.float32]
            found.append(((n,), squares[None], scales[None], GRAM_ROUNDING, error))
            continue
        key = stores, use.scale is None, layout.geometry.groups
        numbers, own, pairs = together.setdefault(key, ([], [], []))
        numbers.append(n)
        own.append(use)
        pairs.append(use.pair)  # type: ignore[arg-type]
    while together:  # packed operands are freed as G is kept
        (stores, *plain), (numbers, own, pairs) = together.popitem()
        gradients, squares = gradients_and_squares(pairs, None, stores)
        if plain != [True, 1]:
            squares = _of_samples(own, squares)
        found.append((numbers, squares, None, 0.0, 0.0))
        if stores:
            for use, one in zip(own, gradients, strict=True):
                use.keep(one)
        del pairs
    return found


def _of_samples(uses: Sequence[ConvolutionFactors], squares: Tensor) -> Tensor:
    """Returns squared norms [uses, B] from those of groups of scaled operands [uses, B · groups].

    Args:
        uses: of one number of groups, all of them scaled or none.
    """
    groups = uses[0].layout.geometry.groups
    if groups > 1:
        squares = squares.unflatten(1, (-1, groups)).sum(2)
    if uses[0].scale is None:
        return squares
    scales = torch.stack([use.scale for use in uses])  # type: ignore[misc]
    # One after the other: the square of a small scale would be zero.
    return squares * scales * scales


@lru_cache(maxsize=1024)
def _plan_of(
    x: torch.Size, y: torch.Size, dtype: torch.dtype, batch_size: int, geometry: Geometry,
    most: int,
) -> tuple[Layout, int]:  # fmt: skip
    """Returns the layout of operands of such shapes, and `samples_at_a_time`.

    Args:
        dtype: of packed operands.
    """
    pictures = max(1, x[0] // max(1, batch_size))
    layout = layout_of(x, y, dtype.itemsize, pictures, geometry)
    return layout, samples_at_a_time(layout, dtype, batch_size, most)


def samples_at_a_time(layout: Layout, dtype: torch.dtype, batch_size: int, most: int) -> int:
    """Returns how many samples are packed at a time, if G is smaller; 0: it is not.

    They take `most` bytes, or are as many as make `LEAST_PROGRAMS`, if these are more.

    Args:
        dtype: of packed operands.
    """
    operands = batch_size * layout.elements * dtype.itemsize
    if batch_size * layout.values * stored_dtype(dtype).itemsize > operands:
        return 0
    programs = batch_size * layout.tiles
    pieces = min(batch_size, ceil_div(operands, most), max(1, programs // LEAST_PROGRAMS))
    return ceil_div(batch_size, pieces) if pieces else 1
