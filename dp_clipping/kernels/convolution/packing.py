"""Packs operands for the kernels: channels last, so that a row is contiguous, and padded.

With the padding written out, a tap is the same shift for every position, and no kernel asks whether
a pixel exists.

Matrix units take TensorFloat-32 operands in one layout only, which is not this one. So where
convolutions may use it, float32 operands are packed as float16, which has as many digits, after
each sample is scaled by a power of two: its largest value is rounded to 2⁻¹¹ of itself, and what is
below 2⁻³⁸ of that becomes zero.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import ceil_div, launch, next_power_of_two, tl, triton

EXPONENT = 14  # of the largest value in float16
SMALLEST = -100  # exponent of a sample's largest value, below which it is scaled no further
BLOCK = 64  # channels and pixels that a program packs
NO_PADDING = (0, 0, 0)
PLACES = ["H", "W", "D_PADDED", "H_PADDED", "W_PADDED", "pad_d", "pad_h", "pad_w"]


class Operand(NamedTuple):
    """A tensor [N, D, H, W, C] as the kernels read it, and what its samples were divided by.

    Attributes:
        values: contiguous, in bfloat16, float16, or float32 that is to be multiplied as such.
        largest: the largest magnitude of each sample [B] float32, of which `scale_of` is what the
            sample was divided by; None: it was not.
    """

    values: Tensor
    largest: Tensor | None


def pack(
    x: Tensor, batch_size: int, tf32: bool, padding: tuple[int, int, int] = NO_PADDING
) -> Operand:
    """Returns x with the channels last; float32 as scaled float16 if TensorFloat-32 may be used.

    Args:
        x: [N, C, D, H, W], N a multiple of B, in float32, bfloat16 or float16.
        padding: zeros before and behind each dimension.
    """
    largest = None
    if tf32 and x.dtype == torch.float32 and x.numel():
        largest = torch.linalg.vector_norm(x.reshape(batch_size, -1), torch.inf, dim=1)
    last = x.movedim(1, -1)
    is_last = last.is_contiguous()
    if is_last and largest is None and padding == NO_PADDING:
        values = last
    else:
        x = x if is_last else x.contiguous()
        dtype = x.dtype if largest is None else torch.float16
        shape, grid, numbers, block = _sizes(x.shape, is_last, batch_size, padding)
        new = x.new_empty if padding == NO_PADDING else x.new_zeros
        values = new(shape, dtype=dtype)
        if x.numel():
            launch(
                _pack_kernel, grid, (x, values, x if largest is None else largest), numbers,
                PADDED=padding != NO_PADDING, SCALED=largest is not None, BLOCK_L=BLOCK,
                BLOCK_C=block, SMALLEST=SMALLEST, EXPONENT=EXPONENT, num_warps=4,
            )  # fmt: skip
    # `Operand(..)` would call a function in Python.
    return tuple.__new__(Operand, (values, largest))


@lru_cache(maxsize=1024)
def _sizes(
    shape: torch.Size, is_last: bool, batch_size: int, padding: tuple[int, int, int]
) -> tuple[Any, ...]:
    """Returns the packed shape, the grid, the kernel's numbers and the channels of a program.

    Args:
        shape: of x [N, C, D, H, W], whose channels are the last in memory, or the second.
    """
    pictures, channels, *pixels = shape
    found = packed_shape(shape, padding)
    padded = found[1:-1]
    count, block = prod(pixels), min(BLOCK, next_power_of_two(max(1, channels)))
    places = (*pixels[1:], *padded, *padding)
    strides = (1, channels) if is_last else (count, 1)
    numbers = (pictures // max(1, batch_size), channels, count, *places, channels * count, *strides)
    grid = (ceil_div(count, BLOCK), ceil_div(channels, block), pictures)
    return found, grid, numbers, block


def packed_shape(shape: torch.Size, padding: tuple[int, int, int] = NO_PADDING) -> tuple[int, ...]:
    """Returns the shape in which `pack` leaves a tensor [N, C, D, H, W]."""
    pictures, channels, *pixels = shape
    padded = [size + 2 * each for size, each in zip(pixels, padding, strict=True)]
    return (pictures, *padded, channels)


def scale_of(largest: Tensor) -> Tensor:
    """Returns the power of two by which samples with such largest magnitudes were divided."""
    exponents = torch.frexp(largest).exponent.clamp_min(SMALLEST) - EXPONENT
    return torch.ldexp(torch.ones_like(largest), exponents)


if triton is not None:

    @triton.jit
    def _exponent_of(largest, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr):
        """Returns log₂ of `scale_of`, from the bits of a float32 number."""
        exponent = (largest.to(tl.int32, bitcast=True) >> 23 & 255) - 126
        return tl.maximum(exponent, SMALLEST) - EXPONENT

    @triton.jit
    def _power_of_two(exponent):
        """Returns 2 to the power of -126 to 127, from its bits."""
        return (exponent + 127 << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _product_of_scales(
        p_largest_x, p_largest_y, i_b, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr
    ):
        """Returns the factor of a sum of products of two operands."""
        e_x = _exponent_of(tl.load(p_largest_x + i_b), SMALLEST, EXPONENT)
        e_y = _exponent_of(tl.load(p_largest_y + i_b), SMALLEST, EXPONENT)
        return _power_of_two(e_x) * _power_of_two(e_y)

    @triton.jit(do_not_specialize=["pictures", *PLACES])
    def _pack_kernel(
        p_x, p_packed, p_largest, pictures, n_channels, n_l, H, W, D_PADDED, H_PADDED, W_PADDED,
        pad_d, pad_h, pad_w, s_picture, s_channel, s_pixel, PADDED: tl.constexpr,
        SCALED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, SMALLEST: tl.constexpr,
        EXPONENT: tl.constexpr,
    ):  # fmt: skip
        """Copies [C, D, H, W] of one picture into padded [D, H, W, C]."""
        i_n = tl.program_id(2).to(tl.int64)
        o_l = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
        o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        m_l, m_c = o_l < n_l, o_c < n_channels
        p_x += i_n * s_picture + o_c[:, None] * s_channel + o_l[None, :] * s_pixel
        b_x = tl.load(p_x, mask=m_c[:, None] & m_l[None, :], other=0)
        if SCALED:
            largest = tl.load(p_largest + i_n // pictures)
            b_x *= _power_of_two(-_exponent_of(largest, SMALLEST, EXPONENT))
        o_to = o_l
        n_to = n_l
        if PADDED:
            i_d, i_h, i_w = o_l // (H * W) + pad_d, o_l // W % H + pad_h, o_l % W + pad_w
            o_to = (i_d * H_PADDED + i_h) * W_PADDED + i_w
            n_to = D_PADDED * H_PADDED * W_PADDED
        p_packed += i_n * n_to * n_channels + o_to[:, None] * n_channels + o_c[None, :]
        b_x = b_x.T.to(p_packed.dtype.element_ty)
        tl.store(p_packed, b_x, mask=m_l[:, None] & m_c[None, :])
