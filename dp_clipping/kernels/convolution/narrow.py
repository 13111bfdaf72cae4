"""Per-sample gradients of convolutions with few channels in a group, depthwise ones above all.

A program computes all taps between one input and one output channel of one picture: sums over
positions, for which matrix units have nothing to do.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dp_clipping.kernels.convolution.geometry import Geometry
from dp_clipping.kernels.launch.tiles import triton

if triton is not None:
    import triton.language as tl

MOST = 1024  # pixels that a program loads at a time


def narrow_gradients(x: Tensor, y: Tensor, geometry: Geometry, batch_size: int) -> Tensor:
    """Returns G [B, O, C / groups, taps] float32 of a convolution with few channels in a group.

    Args:
        x: [N, C, D, H, W], N a multiple of B; y: [N, O, *positions].
    """
    x, y = x.contiguous(), y.contiguous()
    inputs, taps = x.shape[1] // geometry.groups, prod(geometry.taps)
    gradients = x.new_zeros(len(x), y.shape[1], inputs, taps, dtype=torch.float32)
    pixels = y.shape[2:].numel()
    if gradients.numel() and pixels:
        block = min(MOST, triton.next_power_of_2(pixels))
        _narrow_kernel[(gradients.numel() // taps,)](
            x, y, gradients, *x.shape[2:], *y.shape[2:], *geometry.stride, *geometry.padding,
            *geometry.dilation, *geometry.taps, inputs, y.shape[1] // geometry.groups,
            geometry.groups, BLOCK=block, num_warps=4 if block > 256 else 1,
        )  # fmt: skip
    return gradients.view(batch_size, -1, *gradients.shape[1:]).sum(1)


UNSPECIALIZED = [
    *"DHWZYX", "n_groups",
    *(f"{name}_{axis}" for name in ("stride", "pad", "dil", "taps") for axis in "dhw"),
]  # fmt: skip

if triton is not None:

    @triton.jit(do_not_specialize=UNSPECIALIZED)
    def _narrow_kernel(
        p_x, p_y, p_g, D, H, W, Z, Y, X, stride_d, stride_h, stride_w, pad_d, pad_h, pad_w,
        dil_d, dil_h, dil_w, taps_d, taps_h, taps_w, n_inputs, n_outputs, n_groups,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """All taps of one input and output of one picture, channels first."""
        i_row = tl.program_id(0).to(tl.int64)
        i_c, i_y = i_row % n_inputs, i_row // n_inputs
        i_n, i_g = i_y // (n_outputs * n_groups), i_y % (n_outputs * n_groups) // n_outputs
        n_l, n_taps = Z * Y * X, taps_d * taps_h * taps_w
        p_x += ((i_n * n_groups + i_g) * n_inputs + i_c) * D * H * W
        p_y += i_y * n_l
        for i_tap in range(n_taps):
            s_d = i_tap // (taps_h * taps_w) * dil_d - pad_d
            s_h = i_tap // taps_w % taps_h * dil_h - pad_h
            s_w = i_tap % taps_w * dil_w - pad_w
            b_sum = tl.zeros((BLOCK,), tl.float32)
            for o_first in range(0, n_l, BLOCK):
                o_l = o_first + tl.arange(0, BLOCK)
                i_d = o_l // (Y * X) * stride_d + s_d
                i_h = o_l // X % Y * stride_h + s_h
                i_w = o_l % X * stride_w + s_w
                m_l = o_l < n_l
                m_x = m_l & (i_d >= 0) & (i_d < D) & (i_h >= 0) & (i_h < H)
                m_x = m_x & (i_w >= 0) & (i_w < W)
                b_x = tl.load(p_x + (i_d * H + i_h) * W + i_w, mask=m_x, other=0)
                b_y = tl.load(p_y + o_l, mask=m_l, other=0)
                b_sum += b_x.to(tl.float32) * b_y.to(tl.float32)
            tl.store(p_g + i_row * n_taps + i_tap, tl.sum(b_sum))
