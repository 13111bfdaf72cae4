"""Computes per-sample gradients of convolutions with few channels per group, as depthwise ones.

A pair of an input and an output channel has one gradient per tap (position in the kernel): a sum
over the picture's positions. It is no matrix product, so matrix units do not help. A program
computes one row of taps for some pairs of one picture. Channels are the last dimension, so that
neighbouring threads read neighbouring pairs.

Traffic: y is read once for each row of taps, x once for each tap, from the caches.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import sum_of_pictures
from dp_clipping.kernels.convolution.geometry import Geometry
from dp_clipping.kernels.convolution.packing import pack
from dp_clipping.kernels.launch.tiles import launch, next_power_of_two, triton

if triton is not None:
    import triton.language as tl

    from dp_clipping.kernels.convolution.geometry import _row_pixels

PAIRS = 64  # of channels, per program
ELEMENTS = 4096  # of x that a program loads at a time


def narrow_gradients(x: Tensor, y: Tensor, geometry: Geometry, batch_size: int) -> Tensor:
    """Returns G [B, O, C / groups, taps] float32 of a convolution with few channels in a group.

    Args:
        x: [N, C, D, H, W], N a multiple of B; y: [N, O, *positions].
    """
    pictures = x.shape[0]
    inputs, taps = x.shape[1] // geometry.groups, prod(geometry.taps)
    gradients = x.new_empty(pictures, y.shape[1], inputs, taps, dtype=torch.float32)
    if gradients.numel():
        right = pack(x, batch_size, False, geometry.padding).values
        left = pack(y, batch_size, False).values
        grid, numbers, constants = _sizes(right.shape, left.shape, geometry)
        launch(
            _narrow_kernel, (pictures, *grid), (right, left, gradients), numbers, **constants,
            num_warps=4,
        )  # fmt: skip
    return gradients if pictures == batch_size else sum_of_pictures(gradients, batch_size)


@lru_cache(maxsize=1024)
def _sizes(given: torch.Size, left: torch.Size, geometry: Geometry) -> tuple[Any, ...]:
    """Returns the grid of one picture, and the kernel's numbers and constants."""
    groups, last = geometry.groups, geometry.taps[2]
    inputs, outputs = given[-1] // groups, left[-1] // groups
    pairs = left[-1] * inputs
    block_p, block_t = min(PAIRS, next_power_of_two(pairs)), next_power_of_two(last)
    numbers = (
        pairs, *given[1:4], *left[1:4], *geometry.stride, *geometry.dilation, *geometry.taps[1:],
        inputs, outputs, groups,
    )  # fmt: skip
    constants = dict(
        DEPTHWISE=inputs == outputs == 1, BLOCK_T=block_t, BLOCK_P=block_p,
        BLOCK_L=max(1, ELEMENTS // (block_t * block_p)),
    )  # fmt: skip
    return (-(-pairs // block_p), prod(geometry.taps) // last), numbers, constants


UNSPECIALIZED = [
    *"DHWZYX", "n_groups", "taps_h", "taps_w",
    *(f"{name}_{axis}" for name in ("stride", "dil") for axis in "dhw"),
]  # fmt: skip

if triton is not None:

    @triton.jit(do_not_specialize=UNSPECIALIZED)
    def _narrow_kernel(
        p_x, p_y, p_g, n_pairs, D, H, W, Z, Y, X, stride_d, stride_h, stride_w, dil_d, dil_h, dil_w,
        taps_h, taps_w, n_inputs, n_outputs, n_groups, DEPTHWISE: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
    ):  # fmt: skip
        """Computes [taps of a row, pairs] of one picture."""
        i_n, i_row = tl.program_id(0).to(tl.int64), tl.program_id(2)
        o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        m_p = o_p < n_pairs
        if DEPTHWISE:
            n_x, n_y = n_pairs, n_pairs
            o_c, o_o = o_p, o_p
        else:
            n_x, n_y = n_inputs * n_groups, n_outputs * n_groups
            o_o = o_p // n_inputs
            o_c = o_o // n_outputs * n_inputs + o_p % n_inputs
        o_t = tl.arange(0, BLOCK_T)
        m_t = o_t < taps_w
        o_first = (i_row // taps_h * dil_d * H + i_row % taps_h * dil_h) * W
        o_shift = o_first + tl.where(m_t, o_t, 0) * dil_w
        n_l = Z * Y * X
        p_x += i_n * D * H * W * n_x + o_shift[:, None, None] * n_x + o_c[None, None, :]
        p_y += i_n * n_l * n_y + o_o[None, :]
        b_g = tl.zeros((BLOCK_T, BLOCK_L, BLOCK_P), tl.float32)
        for o_l in range(0, n_l, BLOCK_L):
            o_rows = o_l + tl.arange(0, BLOCK_L)
            o_pixels = _row_pixels(
                tl.minimum(o_rows, n_l - 1), D, H, W, Z, Y, X, stride_d, stride_h, stride_w
            )
            m_y = (o_rows < n_l)[:, None] & m_p[None, :]
            b_y = tl.load(p_y + o_rows[:, None] * n_y, mask=m_y, other=0).to(tl.float32)
            b_x = tl.load(p_x + o_pixels[None, :, None] * n_x, mask=m_p[None, None, :], other=0)
            b_g += b_x.to(tl.float32) * b_y[None, :, :]
        o_g = (i_n * n_pairs + o_p[None, :]) * taps_w * (tl.num_programs(2))
        p_g += o_g + i_row * taps_w + o_t[:, None]
        tl.store(p_g, tl.sum(b_g, axis=1), mask=m_t[:, None] & m_p[None, :])
