"""Computes the backward of GroupNorm and InstanceNorm, with sums of each picture and channel.

    w[c] = Σ_l y[c, l] · x̂[c, l],   b[c] = Σ_l y[c, l],   x̂ = (x − mean[g(c)]) · rstd[g(c)]

are a picture's gradients of weight and bias (Wu and He 2018). The input's gradient follows from
them, so PyTorch's backward would compute them once more:

    rstd · (v[c] · y[c, l] − (Σ_g v·b + x̂[c, l] · Σ_g v·w) / n),   v the weight

with sums over the channels of the group, which has n values. Traffic: x and y are read by each of
the two kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import launch, next_power_of_two, tl, triton

MOST = 1024  # pixels that a program loads at a time


def group_norm_backward(
    x: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, wants_x: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of weight and bias of each picture [2, N, C] float32, and that of x.

    Args:
        x, y: input and output gradient [N, C, ..], contiguous, in float32, bfloat16 or float16.
        mean, rstd: of each picture's groups [N, groups].
        weight: [C].
        wants_x: whether the gradient of x is wanted; else it is None.
    """
    sums, found = x.new_empty(2, *x.shape[:2], dtype=torch.float32), None
    if wants_x:
        found = torch.empty_like(x)
    if not x.numel():
        return sums.zero_(), found
    grid, (rows, pixels, own, channels), block, constants = _sizes(x.shape, mean.shape[1])
    launch(_channel_sums_kernel, grid, (x, y, mean, rstd, sums), (rows, pixels, own), **block)
    if wants_x:
        launch(
            _input_gradient_kernel, grid, (x, y, mean, rstd, weight, sums, found),
            (rows, pixels, own, channels), **constants,
        )  # fmt: skip
    return sums, found


def channel_sums_plain(
    x: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of weight and bias, [N, C] each, in this dtype by reference."""
    pictures, channels, groups = *x.shape[:2], mean.shape[1]
    pixels = x.shape[2:].numel()
    rows = x.to(dtype).reshape(pictures, groups, channels // groups * pixels)
    normalized = (rows - mean.to(dtype)[..., None]) * rstd.to(dtype)[..., None]
    y = y.to(dtype).reshape(pictures, channels, pixels)
    return (y * normalized.view_as(y)).sum(2), y.sum(2)


@lru_cache(maxsize=1024)
def _sizes(shape: torch.Size, groups: int) -> tuple[Any, ...]:
    """Returns the grid, the numbers, and the constants of either kernel."""
    pictures, channels = shape[:2]
    pixels, rows, own = shape[2:].numel(), pictures * channels, channels // groups
    block = min(MOST, next_power_of_two(max(1, pixels)))
    constants = {"BLOCK": block, "num_warps": 4 if block > 256 else 1}
    more = {"CHANNELS": next_power_of_two(max(1, own)), **constants}
    return (rows,), (rows, pixels, own, channels), constants, more


if triton is not None:

    @triton.jit
    def _channel_sums_kernel(
        p_x, p_y, p_mean, p_rstd, p_sums, n_rows, n_pixels, n_own, BLOCK: tl.constexpr
    ):
        """Adds up one channel of one picture."""
        i_row = tl.program_id(0).to(tl.int64)
        mean = tl.load(p_mean + i_row // n_own).to(tl.float32)
        rstd = tl.load(p_rstd + i_row // n_own).to(tl.float32)
        p_x += i_row * n_pixels
        p_y += i_row * n_pixels
        b_weight = tl.zeros((BLOCK,), tl.float32)
        b_bias = tl.zeros((BLOCK,), tl.float32)
        for o_first in range(0, n_pixels, BLOCK):
            o_l = o_first + tl.arange(0, BLOCK)
            m_l = o_l < n_pixels
            b_x = tl.load(p_x + o_l, mask=m_l, other=0).to(tl.float32)
            b_y = tl.load(p_y + o_l, mask=m_l, other=0).to(tl.float32)
            b_weight += b_y * (b_x - mean)
            b_bias += b_y
        tl.store(p_sums + i_row, tl.sum(b_weight) * rstd)
        tl.store(p_sums + n_rows + i_row, tl.sum(b_bias))

    @triton.jit
    def _input_gradient_kernel(
        p_x, p_y, p_mean, p_rstd, p_weight, p_sums, p_found, n_rows, n_pixels, n_own, n_channels,
        CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Writes one channel of one picture."""
        i_row = tl.program_id(0).to(tl.int64)
        i_group = i_row // n_own
        o_c = tl.arange(0, CHANNELS)
        m_c = o_c < n_own
        o_rows = i_group * n_own + o_c
        b_v = tl.load(p_weight + o_rows % n_channels, mask=m_c, other=0).to(tl.float32)
        b_weight = tl.load(p_sums + o_rows, mask=m_c, other=0)
        b_bias = tl.load(p_sums + n_rows + o_rows, mask=m_c, other=0)
        mean = tl.load(p_mean + i_group).to(tl.float32)
        rstd = tl.load(p_rstd + i_group).to(tl.float32)
        share = rstd / (n_own * n_pixels).to(tl.float32)
        of_x = tl.sum(b_v * b_weight) * share * rstd
        of_all = tl.sum(b_v * b_bias) * share
        of_y = tl.load(p_weight + i_row % n_channels).to(tl.float32) * rstd
        p_x += i_row * n_pixels
        p_y += i_row * n_pixels
        p_found += i_row * n_pixels
        for o_first in range(0, n_pixels, BLOCK):
            o_l = o_first + tl.arange(0, BLOCK)
            m_l = o_l < n_pixels
            b_x = tl.load(p_x + o_l, mask=m_l, other=0).to(tl.float32)
            b_y = tl.load(p_y + o_l, mask=m_l, other=0).to(tl.float32)
            b_found = of_y * b_y - (b_x - mean) * of_x - of_all
            tl.store(p_found + o_l, b_found.to(p_found.dtype.element_ty), mask=m_l)
