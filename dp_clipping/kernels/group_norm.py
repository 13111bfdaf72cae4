"""Computes the backward of GroupNorm and InstanceNorm, with sums of each picture and channel.

    w[c] = Σ_l y[c, l] · x̂[c, l],   b[c] = Σ_l y[c, l],   x̂ = (x − mean[g(c)]) · rstd[g(c)]

are a picture's gradients of weight and bias (Wu and He 2018). The input's gradient follows from
them, so PyTorch's backward would compute them once more:

    rstd · (v[c] · y[c, l] − (Σ_g v·b + x̂[c, l] · Σ_g v·w) / n),   v the weight

with sums over the channels of the group, which has n values. A program has all values of a group
where registers hold them: one launch, which reads x and y once. Of a larger group each channel has
a program: one launch for the sums, and another one for the input's gradient, and both read x and y.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import launch, next_power_of_two, tl, triton

MOST = 1024  # pixels of a channel that a program loads at a time
WHOLE = 1 << 14  # values of a group, up to which a program has all of them,
WARP = 1 << 10  # and so many of them each of its warps


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
    grid, numbers, is_whole, sizes, of_groups = _sizes(x.shape, mean.shape[1])
    operands = x, y, mean, rstd, weight, sums, found
    if is_whole:
        launch(_group_kernel, grid, operands, numbers, **of_groups)
        return sums, found
    launch(_channel_sums_kernel, grid, (x, y, mean, rstd, sums), numbers[:3], **sizes)
    if wants_x:
        launch(_input_gradient_kernel, grid, operands, numbers, **of_groups)
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
    """Returns the grid, the numbers, whether a program has a group, and constants of the kernels.

    The first constants are of `_channel_sums_kernel`.
    """
    pictures, channels = shape[:2]
    pixels, rows, own = shape[2:].numel(), pictures * channels, channels // groups
    block, columns = next_power_of_two(max(1, own)), next_power_of_two(max(1, pixels))
    numbers = rows, pixels, own, channels
    if block * columns <= WHOLE:
        warps = max(1, block * columns // WARP)
        constants = {"CHANNELS": block, "BLOCK": columns, "num_warps": warps}
        return (pictures * groups,), numbers, True, {}, constants
    columns = min(MOST, columns)
    constants = {"BLOCK": columns, "num_warps": 4 if columns > 256 else 1}
    return (rows,), numbers, False, constants, {"CHANNELS": block, **constants}


if triton is not None:

    @triton.jit
    def _group_kernel(
        p_x, p_y, p_mean, p_rstd, p_weight, p_sums, p_found, n_rows, n_pixels, n_own, n_channels,
        CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Adds up the channels of a group of one picture, and writes the input's gradient."""
        i_group = tl.program_id(0).to(tl.int64)
        o_c, o_l = tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
        m_c, m_l = o_c < n_own, o_l < n_pixels
        o_rows = i_group * n_own + o_c
        o_values = o_rows[:, None] * n_pixels + o_l[None, :]
        m_values = m_c[:, None] & m_l[None, :]
        mean = tl.load(p_mean + i_group).to(tl.float32)
        rstd = tl.load(p_rstd + i_group).to(tl.float32)
        b_y = tl.load(p_y + o_values, mask=m_values, other=0).to(tl.float32)
        b_x = tl.load(p_x + o_values, mask=m_values, other=0).to(tl.float32) - mean
        b_weight, b_bias = tl.sum(b_y * b_x, axis=1) * rstd, tl.sum(b_y, axis=1)
        tl.store(p_sums + o_rows, b_weight, mask=m_c)
        tl.store(p_sums + n_rows + o_rows, b_bias, mask=m_c)
        if p_found is not None:
            b_v = tl.load(p_weight + o_rows % n_channels, mask=m_c, other=0).to(tl.float32)
            share = rstd / tl.cast(n_own * n_pixels, tl.float32)
            of_x = tl.sum(b_v * b_weight) * share * rstd
            of_all = tl.sum(b_v * b_bias) * share
            b_found = b_v[:, None] * rstd * b_y - b_x * of_x - of_all
            tl.store(p_found + o_values, b_found.to(p_found.dtype.element_ty), mask=m_values)

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
        share = rstd / tl.cast(n_own * n_pixels, tl.float32)
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
