"""Computes per-sample gradients of GroupNorm's and InstanceNorm's weight and bias in one pass.

    G_i[c] = Σ_l y_i[c, l] · (x_i[c, l] − mean_i[g(c)]) · rstd_i[g(c)],   Σ_l y_i[c, l] for the bias

Each program adds up one channel of one picture. Traffic: x and y are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import (
    next_power_of_two,
    triton,
)

if triton is not None:
    import triton.language as tl

MOST = 1024  # pixels that a program loads at a time


def channel_sums(x: Tensor, y: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients [N, C] float32 of weight and bias.

    Args:
        x, y: input and output gradient [N, C, ..], contiguous, in float32, bfloat16 or float16.
        mean, rstd: of each picture's groups [N, groups].
    """
    pictures, channels = x.shape[:2]
    pixels = x.shape[2:].numel()
    sums = x.new_empty(2, pictures, channels, dtype=torch.float32)
    if sums.numel():
        block = min(MOST, next_power_of_two(max(1, pixels)))
        _channel_sums_kernel[(pictures * channels,)](
            x, y, mean, rstd, sums, pictures * channels, pixels,
            CHANNELS=channels // mean.shape[1], BLOCK=block, num_warps=4 if block > 256 else 1,
        )  # fmt: skip
    weights, biases = sums.unbind(0)
    return weights, biases


def channel_sums_plain(x: Tensor, y: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation of `channel_sums`, in float32 (float64)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    pictures, channels, groups = *x.shape[:2], mean.shape[1]
    rows = x.to(dtype).reshape(pictures, groups, -1)
    normalized = (rows - mean.to(dtype).unsqueeze(2)) * rstd.to(dtype).unsqueeze(2)
    y = y.to(dtype).reshape(pictures, channels, -1)
    return (y * normalized.view_as(y)).sum(2), y.sum(2)


if triton is not None:

    @triton.jit(do_not_specialize=["n_rows", "n_pixels"])
    def _channel_sums_kernel(
        p_x, p_y, p_mean, p_rstd, p_sums, n_rows, n_pixels, CHANNELS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_row = tl.program_id(0).to(tl.int64)
        mean = tl.load(p_mean + i_row // CHANNELS).to(tl.float32)
        rstd = tl.load(p_rstd + i_row // CHANNELS).to(tl.float32)
        b_weight = tl.zeros((BLOCK,), tl.float32)
        b_bias = tl.zeros((BLOCK,), tl.float32)
        for o_first in range(0, n_pixels, BLOCK):
            o_l = o_first + tl.arange(0, BLOCK)
            m_l = o_l < n_pixels
            b_x = tl.load(p_x + i_row * n_pixels + o_l, mask=m_l, other=0).to(tl.float32)
            b_y = tl.load(p_y + i_row * n_pixels + o_l, mask=m_l, other=0).to(tl.float32)
            b_weight += b_y * (b_x - mean)
            b_bias += b_y
        tl.store(p_sums + i_row, tl.sum(b_weight) * rstd)
        tl.store(p_sums + n_rows + i_row, tl.sum(b_bias))
