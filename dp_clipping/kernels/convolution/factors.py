"""Norms and sums of convolutions on the kernels of linear layers.

G is kept where it is smaller than x and y together; then not all samples need be packed at a time.
Elsewhere packed x and y are kept, and G_i is computed again for the sum. Where positions are few,
norms come from Gram matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import SUM_ROUNDING, stored_dtype
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels.convolution import gram, packing
from dp_clipping.kernels.convolution.geometry import Layout, Packed
from dp_clipping.kernels.convolution.layout import (
    ConvolutionFactors,
    folded,
    memory_of_gradients,
    pack_whole,
    pair_of,
)
from dp_clipping.kernels.convolution.packing import pack
from dp_clipping.kernels.gradient import TileSquares, gradients_and_squares
from dp_clipping.kernels.launch.grouped_launch import Pair
from dp_clipping.kernels.launch.tiles import ceil_div

LEAST_PROGRAMS = 132  # of a launch, if samples are divided: fewer leave processors idle


Rows = tuple[Sequence[int], Tensor, Tensor, float, float]
"""The numbers of some uses, their squared norms [n, B], and the rest as in `Norms.add_rows`."""
Tiled = tuple[int, list[TileSquares], int, Tensor | None]
"""The number of a use, and what `squares_of_tiles` adds up: tiles, groups and scale."""


def take_norms(
    uses: Sequence[ConvolutionFactors], keep: bool, most: int = packing.PACKED_BYTES
) -> tuple[list[Rows], list[Tiled]]:
    """Returns norms of some uses, and squares to add up of the others.

    With `keep`, G is stored where it is smaller than operands. Few launches serve those that are
    packed at once.

    Args:
        most: bytes that are packed at a time, if G is kept in their place.
    """
    found: list[Rows] = []
    tiled: list[Tiled] = []
    whole: list[tuple[int, bool]] = []  # numbers of those that are packed at once; G is stored
    for n, use in enumerate(uses):
        samples = samples_at_a_time(use.layout, use.dtype, use.batch_size, most) if keep else 0
        if 0 < samples < use.batch_size:
            tiles = _squares_of_pieces(use, samples)
            tiled.append((n, tiles, use.geometry.groups, use.scale))
        else:
            whole.append((n, samples > 0))
    pack_whole([uses[n] for n, _ in whole])
    together: dict[bool, tuple[list[int], list[Pair]]] = {}
    for n, stores in whole:
        use = uses[n]
        layout = use.layout
        if not stores and gram.pays(layout, use.dtype.itemsize):
            x, y = use.values
            squares, scales = gram.gram_squares(Packed(x, y, use.scale), layout)
            positions = layout.to_x.pictures * prod(layout.positions)
            error = positions * SUM_ROUNDING[torch.float32]
            found.append(((n,), squares[None], scales[None], GRAM_ROUNDING, error))
            continue
        numbers, pairs = together.setdefault(stores, ([], []))
        numbers.append(n)
        pairs.append(use.pair)  # type: ignore[arg-type]
    while together:  # packed operands are freed as G is kept
        stores, (numbers, pairs) = together.popitem()
        gradients, of_each = gradients_and_squares(pairs, None, stores)
        for n, one, tiles_of_one in zip(numbers, gradients, of_each, strict=True):
            use = uses[n]
            if one is not None:
                use.keep(one)
            tiled.append((n, [tiles_of_one], use.geometry.groups, use.scale))
        del pairs
    return found, tiled


def _squares_of_pieces(use: ConvolutionFactors, samples: int) -> list[TileSquares]:
    """Returns squares of tiles and keeps G; so many samples are packed at once."""
    size, layout = use.batch_size, use.layout
    pictures, groups = layout.to_x.pictures, use.geometry.groups
    (x, y), use.values = use.values, ()
    gradients = memory_of_gradients(y, layout, size, stored_dtype(use.dtype))
    found: list[TileSquares] = []
    scales: list[Any] = []
    for first in range(0, size, samples):
        rows = slice(first * pictures, (first + samples) * pictures)
        own = gradients[first * groups : (first + samples) * groups]
        own_x = folded(x[rows], use.geometry, layout) if layout.folds else x[rows]
        piece = pack(own_x, y[rows], layout.to_x, layout.to_y, use.tf32)
        del own_x
        if first + samples >= size:
            del x, y  # nobody else may have them
        found += gradients_and_squares([pair_of(piece, layout)], None, [own])[1]
        scales.append(piece.scale)
        del piece  # before others are packed
    if scales[0] is not None:
        use.scale = torch.cat(scales)
    use.keep(gradients)
    return found


@lru_cache(maxsize=1024)
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
