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
    x: Tensor, y: Tensor, batch_size: int, tf32: bool,
    padding: tuple[int, int, int] = NO_PADDING,
) -> tuple[Operand, Operand]:  # fmt: skip
    """Returns both with the channels last, by one launch.

    Float32 becomes scaled float16 if TensorFloat-32 may be used.

    Args:
        x, y: [N, C, D, H, W] and [N, O, ..], N a multiple of B, in float32, bfloat16 or float16.
        padding: zeros before and behind each dimension of x.
    """
    largest: Any = None, None
    is_scaled = tf32 and x.dtype == torch.float32 and x.numel() > 0 and y.numel() > 0
    if is_scaled:
        norm, rows = torch.linalg.vector_norm, (batch_size, -1)
        largest = (
            norm(x.reshape(rows), torch.inf, dim=1), norm(y.reshape(rows), torch.inf, dim=1)
        )  # fmt: skip
    packed_x, packed_y = x.movedim(1, -1), y.movedim(1, -1)
    are_last = packed_x.is_contiguous(), packed_y.is_contiguous()
    keeps_x = are_last[0] and not is_scaled and padding == NO_PADDING
    keeps_y = are_last[1] and not is_scaled
    if not (keeps_x and keeps_y):
        work = _work_of(x.shape, y.shape, *are_last, keeps_x, keeps_y, batch_size, padding)
        dtype = torch.float16 if is_scaled else x.dtype
        if not keeps_x:
            x = x if are_last[0] else x.contiguous()
            new = x.new_empty if padding == NO_PADDING else x.new_zeros
            packed_x = new(work.shapes[0], dtype=dtype)
        if not keeps_y:
            y = y if are_last[1] else y.contiguous()
            packed_y = y.new_empty(work.shapes[1], dtype=dtype)
        if work.programs:
            first, second = largest if is_scaled else (x, y)
            launch(
                _pack_kernel, (work.programs,), (x, packed_x, first, y, packed_y, second),
                work.numbers, PADDED=padding != NO_PADDING, SCALED=is_scaled, **work.constants,
                num_warps=4,
            )  # fmt: skip
    # `Operand(..)` would call a function in Python.
    operand_y = tuple.__new__(Operand, (packed_y, largest[1]))
    return tuple.__new__(Operand, (packed_x, largest[0])), operand_y


class _Work(NamedTuple):
    """Holds what follows from the shapes: of the results, and the arguments of the launch."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, int]


@lru_cache(maxsize=1024)
def _work_of(
    x: torch.Size, y: torch.Size, x_is_last: bool, y_is_last: bool, keeps_x: bool, keeps_y: bool,
    batch_size: int, padding: tuple[int, int, int],
) -> _Work:  # fmt: skip
    """Returns the work on operands of such shapes.

    Args:
        x_is_last, y_is_last: whether their channels are the last in memory, or the second.
        keeps_x, keeps_y: whether they are left as they are.
    """
    blocks, counts, strides = [], [], []
    for (pictures, channels, *pixels), is_last, keeps in (
        (x, x_is_last, keeps_x), (y, y_is_last, keeps_y),
    ):  # fmt: skip
        count, block = prod(pixels), min(BLOCK, next_power_of_two(max(1, channels)))
        tiles = ceil_div(count, BLOCK) * ceil_div(channels, block)
        blocks.append(block)
        counts.append(0 if keeps else pictures * tiles)
        strides.append((channels, count, *((1, channels) if is_last else (count, 1))))
    shapes = packed_shape(x, padding), packed_shape(y)
    places = (*x[3:], *shapes[0][1:-1], *padding)
    numbers = (counts[0], x[0] // max(1, batch_size), *places, *strides[0], *strides[1])
    constants = dict(
        BLOCK_L=BLOCK, BLOCK_X=blocks[0], BLOCK_Y=blocks[1], SMALLEST=SMALLEST, EXPONENT=EXPONENT
    )
    return _Work(shapes, sum(counts), numbers, constants)


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

    @triton.jit
    def _pack_tile(
        p_x, p_packed, p_largest, i_program, pictures, n_channels, n_l, s_channel, s_pixel, H, W,
        D_PADDED, H_PADDED, W_PADDED, pad_d, pad_h, pad_w, PADDED: tl.constexpr,
        SCALED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, SMALLEST: tl.constexpr,
        EXPONENT: tl.constexpr,
    ):  # fmt: skip
        """Copies a tile of [C, D, H, W] of one picture into padded [D, H, W, C]."""
        n_tiles_l = tl.cdiv(n_l, BLOCK_L)
        i_rest, i_l = i_program // n_tiles_l, i_program % n_tiles_l
        n_tiles_c = tl.cdiv(n_channels, BLOCK_C)
        i_n, i_c = (i_rest // n_tiles_c).to(tl.int64), i_rest % n_tiles_c
        o_l = i_l * BLOCK_L + tl.arange(0, BLOCK_L)
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
        m_l, m_c = o_l < n_l, o_c < n_channels
        p_x += i_n * n_channels * n_l + o_c[:, None] * s_channel + o_l[None, :] * s_pixel
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

    @triton.jit(do_not_specialize=["programs_x", "pictures", *PLACES])
    def _pack_kernel(
        p_x, p_packed_x, p_largest_x, p_y, p_packed_y, p_largest_y, programs_x, pictures,
        H, W, D_PADDED, H_PADDED, W_PADDED, pad_d, pad_h, pad_w,
        channels_x, n_x, s_channel_x, s_pixel_x, channels_y, n_y, s_channel_y, s_pixel_y,
        PADDED: tl.constexpr, SCALED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_X: tl.constexpr,
        BLOCK_Y: tl.constexpr, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr,
    ):  # fmt: skip
        i_program = tl.program_id(0)
        if i_program < programs_x:
            _pack_tile(
                p_x, p_packed_x, p_largest_x, i_program, pictures, channels_x, n_x, s_channel_x,
                s_pixel_x, H, W, D_PADDED, H_PADDED, W_PADDED, pad_d, pad_h, pad_w,
                PADDED, SCALED, BLOCK_L, BLOCK_X, SMALLEST, EXPONENT,
            )  # fmt: skip
        else:
            _pack_tile(
                p_y, p_packed_y, p_largest_y, i_program - programs_x, pictures, channels_y, n_y,
                s_channel_y, s_pixel_y, 1, 1, 1, 1, 1, 0, 0, 0,
                False, SCALED, BLOCK_L, BLOCK_Y, SMALLEST, EXPONENT,
            )  # fmt: skip
