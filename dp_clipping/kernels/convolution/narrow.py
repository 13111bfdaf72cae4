"""Computes per-sample gradients of convolutions with few channels per group, as depthwise ones.

A pair of an input and an output channel has one gradient per tap (position in the kernel): a sum
over the picture's positions. It is no matrix product, so matrix units do not help. A program
computes a few neighbouring taps of a row for some pairs of one picture. It walks along several
lines of the picture at once: where stride and dilation are equal, the pixels under its taps at one
position are those at the last one, moved on by one, so each step loads one pixel of a line.
Channels are the last dimension, so that neighbouring threads read neighbouring pairs.

Traffic: x and y are read once for each row of taps (more than `TAPS` in a row: for each part).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import sum_of_pictures
from dp_clipping.kernels.convolution.geometry import ONE, Geometry, Grid, Target
from dp_clipping.kernels.convolution.packing import pack
from dp_clipping.kernels.launch.tiles import launch, next_power_of_two, tl, triton

PAIRS = 64  # of channels, per program, at most
ELEMENTS = 512  # pairs times lines that a program walks along at once
SEGMENT = 64  # positions of a line: longer rows are several
TAPS = 8  # of a row, at most, whose sums a program holds


def narrow_gradients(x: Tensor, y: Tensor, geometry: Geometry, batch_size: int) -> Tensor:
    """Returns G [B, O, C / groups, taps] float32 of a convolution with few channels in a group.

    Args:
        x: [N, C, D, H, W], N a multiple of B; y: [N, O, *positions].
    """
    pictures = x.shape[0]
    inputs, taps = x.shape[1] // geometry.groups, prod(geometry.taps)
    gradients = x.new_empty(pictures, y.shape[1], inputs, taps, dtype=torch.float32)
    if gradients.numel():
        targets, grid, numbers, constants = _sizes(x.shape, y.shape, geometry)
        right, left, _ = pack(x, y, *targets)
        launch(
            _narrow_kernel, (pictures, *grid), (right, left, gradients), numbers, **constants,
            num_warps=4,
        )  # fmt: skip
    return gradients if pictures == batch_size else sum_of_pictures(gradients, batch_size)


@lru_cache(maxsize=1024)
def _sizes(x: torch.Size, y: torch.Size, geometry: Geometry) -> tuple[Any, ...]:
    """Returns how to pack, the grid of one picture, and the kernel's numbers and constants."""
    padded = [size + 2 * each for size, each in zip(x[2:], geometry.padding, strict=True)]
    given, left = (*padded, x[1]), (*y[2:], y[1])
    sizes: Any = tuple(padded), tuple(y[2:])
    targets = (
        Target(1, 1, x[1], Grid(ONE, sizes[0]), geometry.padding),
        Target(1, 1, y[1], Grid(ONE, sizes[1])),
    )
    groups, last = geometry.groups, geometry.taps[2]
    inputs, outputs = given[-1] // groups, left[-1] // groups
    pairs = left[-1] * inputs
    parts, segments = -(-last // TAPS), -(-left[2] // SEGMENT)
    lines = left[0] * left[1] * segments
    block_p = min(PAIRS, next_power_of_two(pairs))
    numbers = (
        pairs, *given[:3], *left[:3], *geometry.stride, *geometry.dilation, *geometry.taps[1:],
        inputs, outputs, groups, segments, -(-left[2] // segments), parts,
    )  # fmt: skip
    constants = dict(
        DEPTHWISE=inputs == outputs == 1, SLIDES=geometry.stride[2] == geometry.dilation[2],
        TAPS=-(-last // parts), BLOCK_P=block_p,
        BLOCK_R=min(ELEMENTS // block_p, next_power_of_two(lines)),
    )  # fmt: skip
    return targets, (-(-pairs // block_p), prod(geometry.taps[:2]) * parts), numbers, constants


UNSPECIALIZED = [
    *"DHWZYX", "n_groups", "taps_h", "taps_w", "n_segments", "n_columns", "n_parts",
    *(f"{name}_{axis}" for name in ("stride", "dil") for axis in "dhw"),
]  # fmt: skip

if triton is not None:

    @triton.jit(do_not_specialize=UNSPECIALIZED)
    def _narrow_kernel(
        p_x, p_y, p_g, n_pairs, D, H, W, Z, Y, X, stride_d, stride_h, stride_w, dil_d, dil_h, dil_w,
        taps_h, taps_w, n_inputs, n_outputs, n_groups, n_segments, n_columns, n_parts,
        DEPTHWISE: tl.constexpr, SLIDES: tl.constexpr, TAPS: tl.constexpr, BLOCK_P: tl.constexpr,
        BLOCK_R: tl.constexpr,
    ):  # fmt: skip
        """Computes [TAPS, pairs] of one picture, from tap number i_t of row i_row on."""
        i_n, i_row = tl.program_id(0).to(tl.int64), tl.program_id(2) // n_parts
        i_t = tl.program_id(2) % n_parts * TAPS
        o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        m_p = o_p < n_pairs
        if DEPTHWISE:
            n_x, n_y = n_pairs, n_pairs
            o_c, o_o = o_p, o_p
        else:
            n_x, n_y = n_inputs * n_groups, n_outputs * n_groups
            o_o = o_p // n_inputs
            o_c = o_o // n_outputs * n_inputs + o_p % n_inputs
        p_x += i_n * D * H * W * n_x + o_c[None, :]
        p_y += i_n * Z * Y * X * n_y + o_o[None, :]
        o_first = (i_row // taps_h * dil_d * H + i_row % taps_h * dil_h) * W
        sums = ()
        for _ in tl.static_range(TAPS):
            sums += (tl.zeros((BLOCK_R, BLOCK_P), tl.float32),)  # type: ignore[assignment]
        for o_l in range(0, Z * Y * n_segments, BLOCK_R):
            o_line = o_l + tl.arange(0, BLOCK_R)
            i_zy, i_x = o_line // n_segments, o_line % n_segments * n_columns
            m_line = (o_line < Z * Y * n_segments)[:, None] & m_p[None, :]
            o_pixel = o_first + (i_zy // Y * stride_d * H + i_zy % Y * stride_h) * W
            i_w = i_x * stride_w + i_t * dil_w  # of the first tap
            p_pixel = p_x + (o_pixel + i_w)[:, None] * n_x
            p_own = p_y + (i_zy * X + i_x)[:, None] * n_y
            pixels = ()
            if SLIDES:
                for t in tl.static_range(TAPS - 1):
                    m_x = m_line & (i_w + t * dil_w < W)[:, None]
                    b_x = tl.load(p_pixel + t * dil_w * n_x, mask=m_x, other=0).to(tl.float32)
                    pixels += (b_x,)  # type: ignore[assignment]
            for i in tl.range(n_columns, loop_unroll_factor=TAPS):
                m_y = m_line & (i_x + i < X)[:, None]
                b_y = tl.load(p_own + i * n_y, mask=m_y, other=0).to(tl.float32)
                for t in tl.static_range(TAPS - 1 if SLIDES else 0, TAPS):
                    o_w = i * stride_w + t * dil_w
                    m_x = m_line & (i_w + o_w < W)[:, None]
                    b_x = tl.load(p_pixel + o_w * n_x, mask=m_x, other=0).to(tl.float32)
                    pixels += (b_x,)  # type: ignore[assignment]
                found = ()
                for t in tl.static_range(TAPS):
                    found += (sums[t] + pixels[t] * b_y,)  # type: ignore[assignment]
                sums = found
                pixels = pixels[1:] if SLIDES else ()
        p_g += (i_n * n_pairs + o_p) * taps_w * (tl.num_programs(2) // n_parts) + i_row * taps_w
        for t in tl.static_range(TAPS):
            n_own = tl.where(i_t + t < taps_w, n_pairs, 0)
            tl.store(p_g + i_t + t, tl.sum(sums[t], axis=0), mask=o_p < n_own)
