"""Computes per-sample gradients of GroupNorm's and InstanceNorm's weight and bias in one pass.

    G_i[c] = Σ_l y_i[c, l] · (x_i[c, l] − mean_i[g(c)]) · rstd_i[g(c)],   Σ_l y_i[c, l] for the bias

Each program adds up one channel of one picture; one launch serves many layers. Traffic: x and y are
read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import sum_of_pictures
from dp_clipping.kernels.launch.grouped_launch import MOST_ROWS
from dp_clipping.kernels.launch.tiles import kept_table_on, launch, tl, triton

if triton is not None:
    from dp_clipping.kernels.launch.tiles import _row_of

MOST = 1024  # pixels that a program loads at a time


class Channels(NamedTuple):
    """The operands from which the weight's and bias's gradients of one use follow.

    Attributes:
        x, y: input and output gradient [N, C, ..], contiguous, in float32, bfloat16 or float16.
        mean, rstd: of each picture's groups [N, groups].
        batch_size: B, of which N is a multiple.
    """

    x: Tensor
    y: Tensor
    mean: Tensor
    rstd: Tensor
    batch_size: int

    def plain(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Returns the gradients [B, C] of weight and bias in this dtype, by reference."""
        pictures, channels, groups = *self.x.shape[:2], self.mean.shape[1]
        rows = self.x.to(dtype).reshape(pictures, groups, -1)
        normalized = (rows - self.mean.to(dtype)[..., None]) * self.rstd.to(dtype)[..., None]
        y = self.y.to(dtype).reshape(pictures, channels, -1)
        found = (y * normalized.view_as(y)).sum(2), y.sum(2)
        weights, biases = [sum_of_pictures(sums, self.batch_size) for sums in found]
        return weights, biases


def channel_sums(uses: Sequence[Channels]) -> list[tuple[Tensor, Tensor]]:
    """Returns the gradients [B, C] float32 of weight and bias of each; few launches serve many."""
    found: list[Any] = [None] * len(uses)
    alike: dict[tuple, list[int]] = {}
    for number, use in enumerate(uses):
        pixels = use.x.shape[2:].numel()
        block = 1 << (min(MOST, max(1, pixels)) - 1).bit_length()
        key = use.x.dtype, use.y.dtype, use.rstd.dtype, block
        alike.setdefault(key, []).append(number)
    for (_, _, _, block), numbers in alike.items():
        for first in range(0, len(numbers), MOST_ROWS):
            some = numbers[first : first + MOST_ROWS]
            for number, result in zip(some, _launch([uses[n] for n in some], block), strict=True):
                found[number] = result
    return found


def _launch(uses: list[Channels], block: int) -> list[tuple[Tensor, Tensor]]:
    """Returns those of uses of the same dtypes, whose programs load `block` pixels at a time."""
    x, y, _, rstd, _ = uses[0]
    counts = [use.x.shape[0] * use.x.shape[1] for use in uses]
    starts = [0, *accumulate(counts)]
    sums = torch.empty(2, starts[-1], dtype=torch.float32, device=x.device)
    words = [
        word
        for x, y, mean, rstd, _ in uses
        for word in (
            x.data_ptr(), y.data_ptr(), mean.data_ptr(), rstd.data_ptr(),
            x.shape[2:].numel(), x.shape[1] // mean.shape[1],
        )
    ]  # fmt: skip
    if starts[-1]:
        table = kept_table_on(x.device, (*starts, *words))
        launch(
            _channel_sums_kernel, (starts[-1],), (table, table[len(starts) :], sums),
            (len(uses), starts[-1]), X=x.dtype, Y=y.dtype, STATISTICS=rstd.dtype,
            MOST=1 << len(uses).bit_length(), BLOCK=block, num_warps=4 if block > 256 else 1,
        )  # fmt: skip
    found = []
    for use, own in zip(uses, sums.split_with_sizes(counts, 1), strict=True):
        pictures, size = use.x.shape[0], use.batch_size
        weights, biases = own.view(2, pictures, use.x.shape[1]).unbind(0)
        if pictures != size:
            weights, biases = sum_of_pictures(weights, size), sum_of_pictures(biases, size)
        found.append((weights, biases))
    return found


if triton is not None:

    @triton.jit(do_not_specialize=["n_uses", "n_rows"])
    def _channel_sums_kernel(
        p_starts, p_uses, p_sums, n_uses, n_rows, X: tl.constexpr, Y: tl.constexpr,
        STATISTICS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_use, i_own = _row_of(p_starts, n_uses, MOST)
        p_use = p_uses + 6 * i_use
        i_row = i_own.to(tl.int64)
        n_pixels, n_channels = tl.load(p_use + 4), tl.load(p_use + 5)
        p_x = tl.load(p_use).to(tl.pointer_type(X)) + i_row * n_pixels
        p_y = tl.load(p_use + 1).to(tl.pointer_type(Y)) + i_row * n_pixels
        i_group = i_row // n_channels
        mean = tl.load(tl.load(p_use + 2).to(tl.pointer_type(STATISTICS)) + i_group)
        rstd = tl.load(tl.load(p_use + 3).to(tl.pointer_type(STATISTICS)) + i_group)
        b_weight = tl.zeros((BLOCK,), tl.float32)
        b_bias = tl.zeros((BLOCK,), tl.float32)
        for o_first in range(0, n_pixels, BLOCK):
            o_l = o_first + tl.arange(0, BLOCK)
            m_l = o_l < n_pixels
            b_x = tl.load(p_x + o_l, mask=m_l, other=0).to(tl.float32)
            b_y = tl.load(p_y + o_l, mask=m_l, other=0).to(tl.float32)
            b_weight += b_y * (b_x - mean.to(tl.float32))
            b_bias += b_y
        p_own = p_sums + tl.program_id(0)
        tl.store(p_own, tl.sum(b_weight) * rstd.to(tl.float32))
        tl.store(p_own + n_rows, tl.sum(b_bias))
