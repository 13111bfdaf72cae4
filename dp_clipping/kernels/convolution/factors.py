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
from dp_clipping.kernels.convolution.geometry import Layout, Packed
from dp_clipping.kernels.convolution.layout import (
    folded,
    layout_of,
    memory_of_gradients,
    pairs_of,
    pairs_of_groups,
)
from dp_clipping.kernels.convolution.packing import pack
from dp_clipping.kernels.gradient import gradients_and_squares
from dp_clipping.kernels.launch.grouped_launch import Pair
from dp_clipping.kernels.launch.tiles import ceil_div

LEAST_PROGRAMS = 192  # of a launch, if samples are divided: fewer leave processors idle


class ConvolutionFactors:
    """Operands of one use, packed for the kernels of linear layers; see `take_norms`.

    Args:
        use: x and y, the parameter's shape and geometry, as `layers.convolution.Factors` has them.

    Attributes:
        shape: of the parameter.
        layout: of packed operands.
        samples: how many are packed at a time, if G is kept in their place; 0: it is larger.
        values: the packed operands' tensors, of which the sum will be formed.
        scale: [B] float32, by which gradients and products of `values` are multiplied, or None.
        pairs: `values` as operands of linear layers [B · groups, T, ..], one of each run.
        summands: the same [B, T, ..], one of each run and group.
        gradients: G of each run [B, ..], or None.
    """

    held = attrgetter("values")

    def __init__(self, use: Any):
        self.use = use
        self.shape, self._geometry, self.batch_size = use.shape, use.geometry, use.batch_size
        cudnn: Any = torch.backends.cudnn
        wide = use.x.dtype == torch.float32
        self._tf32 = wide and cudnn.conv.fp32_precision == "tf32"
        self.dtype = torch.float16 if self._tf32 else use.x.dtype
        pictures = max(1, use.x.shape[0] // max(1, self.batch_size))
        given = use.x.shape, use.y.shape
        self.layout = layout_of(*given, self.dtype.itemsize, pictures, use.geometry)
        self.samples = samples_at_a_time(
            self.layout, self.dtype, self.batch_size, packing.PACKED_BYTES
        )
        self.values: tuple[Tensor, ...] = ()  # may be the layer's own
        self.scale: Tensor | None = None
        self.pairs: list[Pair] = []
        self.summands: list[Pair] = []
        self.gradients: list[Tensor] | None = None

    def pack(self) -> Packed:
        """Packs all samples, in place of what they are packed from."""
        use, self.use = self.use, None
        layout = self.layout
        x = folded(use.x, self._geometry, layout) if layout.folds else use.x
        found = pack(x, use.y, layout.to_x, layout.to_y, self._tf32)
        self.values, self.scale = found[:2], found.scale
        self.pairs = self.summands = pairs_of(found, layout)
        if layout.geometry.groups > 1:
            self.summands = pairs_of_groups(self.pairs, layout.geometry.groups)
        return found

    def keep(self, gradients: Sequence[Tensor]) -> None:
        """Keeps G [B · groups, ..] of each run in place of the operands."""
        self.values, self.pairs, self.summands = (), [], []
        groups = self._geometry.groups
        self.gradients = [
            g.view(self.batch_size, groups * g.shape[1], g.shape[2]) for g in gradients
        ]

    def take_norms_of_pieces(self) -> Tensor:
        """Returns squared norms [runs, B] and keeps G; some samples after others are packed."""
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
            own = slice(first * groups, (first + samples) * groups)
            own_x = folded(x[rows], self._geometry, layout) if layout.folds else x[rows]
            piece = pack(own_x, y[rows], layout.to_x, layout.to_y, self._tf32)
            del own_x
            if first + samples >= size:
                del x, y  # nobody else may have them
            found = gradients_and_squares(
                pairs_of(piece, layout), None, [g[own] for g in gradients]
            )
            squares.append(torch.stack([one for _, one in found]))
            scales.append(piece.scale)
            del piece  # before others are packed
        if scales[0] is not None:
            self.scale = torch.cat(scales)
        self.keep(gradients)
        return self.of_samples(torch.cat(squares, 1))

    def of_samples(self, squares: Tensor) -> Tensor:
        """Returns squared norms [runs, B] from those of groups of scaled operands."""
        groups = self._geometry.groups
        if groups > 1:
            squares = squares.unflatten(1, (self.batch_size, groups)).sum(2)
        # One after the other: the square of a small scale would be zero.
        return squares if self.scale is None else squares * self.scale * self.scale


Rows = tuple[Tensor, Tensor | None, float, float]
"""Squared norms [n, B], whose sum is a parameter's, and the rest as in `Norms.add_rows`."""


def take_norms(uses: Sequence[ConvolutionFactors], keep: bool) -> list[Rows]:
    """Returns norms of each use; with `keep`, G is stored where it is smaller than operands.

    Few launches serve those that are packed at once.
    """
    found: list[Any] = [None] * len(uses)
    together: dict[bool, list[int]] = {}
    for n, use in enumerate(uses):
        stores = keep and use.samples > 0
        if stores and use.samples < use.batch_size:
            found[n] = use.take_norms_of_pieces(), None, 0.0, 0.0
            continue
        operands = use.pack()
        if not stores and gram.pays(use.layout, use.dtype.itemsize):
            squares, scales = gram.gram_squares(operands, use.layout)
            positions = use.layout.to_x.pictures * prod(use.layout.positions)
            error = positions * SUM_ROUNDING[torch.float32]
            found[n] = squares[None], scales[None], GRAM_ROUNDING, error
        else:
            together.setdefault(stores, []).append(n)
    for stores, numbers in together.items():
        pairs: list[Pair] = []
        for n in numbers:
            pairs += uses[n].pairs
        results = gradients_and_squares(pairs, None, stores)
        for n in numbers:
            use = uses[n]
            own, results = results[: len(use.pairs)], results[len(use.pairs) :]
            gradients: Any
            norms: Any
            gradients, norms = zip(*own, strict=True)
            found[n] = use.of_samples(torch.stack(norms)), None, 0.0, 0.0
            if stores:
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
