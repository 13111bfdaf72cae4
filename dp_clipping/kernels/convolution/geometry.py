"""Geometry of a convolution, and the reference implementation of its per-sample gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.kernels.launch.tiles import tl, triton

NARROW = 16  # inputs times outputs of a group, up to which matrix units are left alone
VECTOR = 16  # channels side by side in memory that a thread's loads may count on, if divisible
UNSPECIALIZED = [
    "batch_size", "share", "pictures", *"DHWZYX", "n_groups",
    *(f"{name}_{axis}" for name in ("stride", "dil", "taps") for axis in "dhw"),
]  # fmt: skip


class Geometry(NamedTuple):
    """Sizes and strides of a convolution in three dimensions; missing dimensions are 1.

    Attributes:
        taps: size of the kernel.
        stride, padding, dilation: as PyTorch's.
        groups: number of groups of channels.
    """

    taps: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    groups: int


def patches(x: Tensor, geometry: Geometry, positions: tuple[int, ...]) -> Tensor:
    """Returns the pixels under each tap: a view [N, C, *positions, *taps] of padded x.

    Args:
        x: [N, C, D, H, W].
        positions: output positions in each dimension.
    """
    if any(geometry.padding):
        x = F.pad(x, [p for p in reversed(geometry.padding) for _ in (0, 1)])
    for n, (taps, stride, dilation) in enumerate(
        zip(geometry.taps, geometry.stride, geometry.dilation, strict=True)
    ):
        x = x.unfold(2 + n, (taps - 1) * dilation + 1, stride)[..., ::dilation]
        x = x.narrow(2 + n, 0, positions[n])
    return x


def gradients_plain(x: Tensor, y: Tensor, geometry: Geometry, batch_size: int) -> Tensor:
    """Reference implementation: G [B, O, C / groups, taps], products in the operands' dtype.

    Args:
        x: [N, C, D, H, W], N a multiple of B: a sample's pictures are side by side.
        y: [N, O, *positions].
    """
    positions, groups, taps = y.shape[2:], geometry.groups, prod(geometry.taps)
    pictures = y.shape[0] // max(1, batch_size)
    inputs, outputs = x.shape[1] // groups, y.shape[1] // groups
    length = pictures * prod(positions)  # summed over
    found = patches(x, geometry, positions)
    found = found.view(batch_size, pictures, groups, inputs, *positions, *geometry.taps)
    found = found.permute(0, 2, 1, 4, 5, 6, 3, 7, 8, 9)
    right = found.reshape(batch_size * groups, length, inputs * taps)
    own = y.view(batch_size, pictures, groups, outputs, *positions).permute(0, 2, 3, 1, 4, 5, 6)
    left = own.reshape(batch_size * groups, outputs, length)
    return torch.bmm(left, right).view(batch_size, groups * outputs, inputs, taps)


def numbers(geometry: Geometry, pixels: Sequence[int], positions: Sequence[int]) -> tuple[int, ...]:
    """Returns the arguments of the kernels that say where pixels are: D to X, then D to W each."""
    return (*pixels, *positions, *geometry.stride, *geometry.dilation, *geometry.taps)


if triton is not None:

    @triton.jit
    def _row_pixels(o_rows, D, H, W, Z, Y, X, stride_d, stride_h, stride_w):
        """Returns the pixels of padded x under the first tap at positions of all pictures."""
        n_l = Z * Y * X
        i_picture, i_l = o_rows // n_l, o_rows % n_l
        i_d = i_l // (Y * X) * stride_d
        i_h = i_l // X % Y * stride_h
        i_w = i_l % X * stride_w
        return ((i_picture * D + i_d) * H + i_h) * W + i_w

    @triton.jit
    def _column_offsets(
        o_n, n_columns, i_g, n_inputs, n_groups, H, W, dil_d, dil_h, dil_w, taps_h, taps_w,
        VECTOR: tl.constexpr,
    ):  # fmt: skip
        """Returns the offsets of columns (tap, channel) from the first tap's pixel."""
        o_n = tl.where(o_n < n_columns, o_n, 0)  # in place of columns that do not exist
        i_tap, i_c = o_n // n_inputs, o_n % n_inputs
        o_d, o_h = i_tap // (taps_h * taps_w) * dil_d, i_tap // taps_w % taps_h * dil_h
        o_pixel = (o_d * H + o_h) * W + i_tap % taps_w * dil_w
        found = (o_pixel * n_groups + i_g) * n_inputs + i_c
        if VECTOR > 1:
            found = tl.multiple_of(tl.max_contiguous(found, VECTOR), VECTOR)
        return found
