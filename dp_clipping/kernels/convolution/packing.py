"""Packs operands for the kernels: channels last, so that a row is contiguous, at a grid's places.

Matrix units take TensorFloat-32 operands in one layout only, which is not this one. So where
convolutions may use it, float32 operands are packed as float16, which has as many digits, after
each sample is scaled by a power of two: its largest value is rounded to 2⁻¹¹ of itself, and what is
below 2⁻³⁸ of that becomes zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_clipping.kernels.convolution.geometry import Packed, Target, places_of_pixels
from dp_clipping.kernels.launch.tiles import (
    ALIGNMENT,
    _holders,
    ceil_div,
    held,
    launch,
    next_power_of_two,
    tl,
    triton,
)

EXPONENT = 14  # of the largest value in float16
SMALLEST = -100  # exponent of a sample's largest value, below which it is scaled no further
BLOCK = 64  # channels and pixels that a program packs
PACKED_BYTES = 1 << 26  # of operands that are packed at a time, if nothing else keeps them,
MOST_PACKED_BYTES = 1 << 28  # and the same in memory that backward has freed
UNSPECIALIZED = [
    f"{name}_{operand}" for operand in "xy" for name in ("n_plane", "pictures", "n_rows")
]


def pack(x: Tensor, y: Tensor, to_x: Target, to_y: Target, tf32: bool = False) -> Packed:
    """Packs both by one launch. Float32 becomes scaled float16 if TensorFloat-32 may be used.

    Args:
        x, y: [N, C, D, H, W] and [N, O, ..] in float32, bfloat16 or float16.
    """
    is_scaled = tf32 and x.dtype == torch.float32 and x.numel() > 0 and y.numel() > 0
    work = _work_of(x.shape, y.shape, x.stride(), y.stride(), is_scaled, to_x, to_y, x.device)
    if _holders:
        held(work.places)
    shapes, keeps = work.shapes, work.keeps
    if all(keeps):
        x, y = x.movedim(1, -1), y.movedim(1, -1)
        return tuple.__new__(Packed, (x.view(shapes[0]), y.view(shapes[1]), None))
    scale = None
    norms: tuple[Any, Any] = (None, None)
    if is_scaled:
        samples, largest = (x.shape[0] // to_x.pictures, -1), torch.linalg.vector_norm
        dims = (1, 2, 3, 4, 5)
        norms = (
            largest(x.unflatten(0, samples), torch.inf, dims),
            largest(y.unflatten(0, samples), torch.inf, dims),
        )  # fmt: skip
        scale = norms[0].new_empty(samples[0])
    new = x.new_zeros if work.fills else x.new_empty  # for both at once
    memory = new(work.size, dtype=torch.float16 if is_scaled else x.dtype)
    results = (
        x.movedim(1, -1).view(shapes[0]) if keeps[0]
        else memory.as_strided(shapes[0], work.strides[0]),
        y.movedim(1, -1).view(shapes[1]) if keeps[1]
        else memory.as_strided(shapes[1], work.strides[1], work.start),
    )  # fmt: skip
    if work.programs:
        x = x.contiguous() if work.copies[0] else x
        y = y.contiguous() if work.copies[1] else y
        launch(
            _pack_kernel, (work.programs,), (x, y, *results, *norms, scale, *work.places),
            work.numbers, SCALED=is_scaled, **work.constants, num_warps=4,
        )  # fmt: skip
    return tuple.__new__(Packed, (*results, scale))  # `Packed(..)` would call a function in Python


def packed_at_a_time(freed: int) -> int:
    """Returns how many bytes of operands are packed at a time, if nothing else keeps them.

    They are a power of two: the division of a batch into pieces is looked up by them.

    Args:
        freed: bytes that backward has freed, of which they may take half.
    """
    half = 1 << max(0, freed // 2).bit_length() >> 1
    return min(MOST_PACKED_BYTES, max(PACKED_BYTES, half))


class _Work(NamedTuple):
    """Holds what follows from the shapes: of the results, and the arguments of the launch.

    Attributes:
        strides: of the results in memory that they share.
        start: of the second of them.
        size: of that memory, in elements.
        keeps: of each operand, whether it already lies so.
        copies: whether it is copied first, since its pixels are not at equal distances.
        fills: whether zeros are between what is written.
        places: of each operand, those of a picture's pixels (`places_of_pixels`), where it is not
            packed pixel by pixel.
    """

    shapes: tuple[tuple[int, int, int], tuple[int, int, int]]
    strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    start: int
    size: int
    keeps: tuple[bool, bool]
    copies: tuple[bool, bool]
    fills: bool
    places: tuple[Tensor | None, Tensor | None]
    programs: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def _distance(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Returns how far a pixel is from the next one in memory; None: not all are equally far."""
    distance, count = 1, 1
    for size, stride in reversed(list(zip(sizes, strides, strict=True))):
        if size == 1:
            continue
        if count == 1:
            distance = stride
        elif stride != distance * count:
            return None
        count *= size
    return distance


def _lie_at(sizes: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """Returns whether the strides are the wanted ones, where there is more than one element."""
    return all(n == 1 or s == w for n, s, w in zip(sizes, strides, wanted, strict=True))


@lru_cache(maxsize=1024)
def _places_on(device: torch.device, pixels: tuple[int, ...], to: Target) -> Tensor:
    """Returns `places_of_pixels`, which batches of all sizes share."""
    return places_of_pixels(pixels, to).to(device)


@lru_cache(maxsize=1024)
def _work_of(
    x: torch.Size, y: torch.Size, strides_x: tuple[int, ...], strides_y: tuple[int, ...],
    is_scaled: bool, to_x: Target, to_y: Target, device: torch.device,
) -> _Work:  # fmt: skip
    """Returns the work on operands of such shapes and strides."""
    keeps, copies, fills, counts, tables = [], [], [], [], []
    numbers: list[int] = []
    constants: dict[str, Any] = dict(SMALLEST=SMALLEST, EXPONENT=EXPONENT, BLOCK_L=BLOCK)
    for name, (pictures, channels, *pixels), strides, to in (
        ("X", x, strides_x, to_x), ("Y", y, strides_y, to_y),
    ):  # fmt: skip
        count, block = prod(pixels), min(BLOCK, next_power_of_two(max(1, channels)))
        # With padding and a stride the grid may have the sizes of the pixels, and other places.
        is_moved = (*pixels,) != to.grid.sizes or prod(to.grid.phases) > 1
        is_placed = is_moved or any(to.padding)
        is_padded = to.groups * to.width != channels
        pixel = _distance(pixels, strides[2:])
        copies.append(pixel is None)
        places = (channels * count, count, 1) if pixel is None else (*strides[:2], pixel)
        is_last = _lie_at((pictures, channels, count), places, (channels * count, 1, channels))
        keeps.append(is_last and not (is_scaled or is_placed or is_padded or to.groups > 1))
        fills.append(is_placed or is_padded)
        counts.append(
            0 if keeps[-1] else pictures * ceil_div(count, BLOCK) * ceil_div(channels, block)
        )
        tables.append(_places_on(device, (*pixels,), to) if is_placed else None)
        numbers += channels, count, *places, prod(to.grid.sizes) if is_placed else count
        numbers += to.pictures, to.shape(pictures)[1], channels // to.groups, to.width
        constants |= {
            f"PLACED_{name}": is_placed, f"GROUPED_{name}": to.groups > 1, f"BLOCK_{name}": block,
        }  # fmt: skip
    shapes = to_x.shape(x[0]), to_y.shape(y[0])
    rows = [(count * width, width, 1) for _, count, width in shapes]
    sizes = [0 if keep else prod(shape) for keep, shape in zip(keeps, shapes, strict=True)]
    start = ceil_div(sizes[0], ALIGNMENT) * ALIGNMENT
    return _Work(
        shapes, (rows[0], rows[1]), start, start + sizes[1], (keeps[0], keeps[1]),
        (copies[0], copies[1]),
        any(fill and not keep for fill, keep in zip(fills, keeps, strict=True)),
        (tables[0], tables[1]), sum(counts), (counts[0], *numbers), constants,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _exponent_of(largest, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr):
        """Returns log₂ of what samples with such a largest magnitude are divided by, from bits."""
        exponent = (largest.to(tl.int32, bitcast=True) >> 23 & 255) - 126
        return tl.maximum(exponent, SMALLEST) - EXPONENT

    @triton.jit
    def _power_of_two(exponent):
        """Returns 2 to the power of -126 to 127, from its bits."""
        return (exponent + 127 << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _pack_tile(
        p_x, p_packed, p_largest, p_places, i_program, n_channels, n_l, s_picture, s_channel,
        s_pixel, n_plane, pictures, n_rows, n_own, n_row, PLACED: tl.constexpr,
        GROUPED: tl.constexpr, SCALED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
        SMALLEST: tl.constexpr, EXPONENT: tl.constexpr,
    ):  # fmt: skip
        """Copies a tile of [C, D, H, W] of one picture to its places."""
        n_tiles_l = tl.cdiv(n_l, BLOCK_L)
        i_rest, i_l = i_program // n_tiles_l, i_program % n_tiles_l
        n_tiles_c = tl.cdiv(n_channels, BLOCK_C)
        i_n, i_c = (i_rest // n_tiles_c).to(tl.int64), i_rest % n_tiles_c
        i_b, i_picture = i_n // pictures, (i_n % pictures).to(tl.int32)
        o_l = i_l * BLOCK_L + tl.arange(0, BLOCK_L)
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
        m_l, m_c = o_l < n_l, o_c < n_channels
        p_x += i_n * s_picture + o_l[None, :].to(tl.int64) * s_pixel
        p_x += o_c[:, None].to(tl.int64) * s_channel
        b_x = tl.load(p_x, mask=m_c[:, None] & m_l[None, :], other=0)
        if SCALED:
            b_x *= _power_of_two(-_exponent_of(tl.load(p_largest + i_b), SMALLEST, EXPONENT))
        o_to = o_l
        if PLACED:
            o_to = tl.load(p_places + o_l, mask=m_l, other=-1)
            m_l = o_to >= 0
        o_to += i_picture * n_plane
        if GROUPED:
            i_sample = i_b * (n_channels // n_own) + o_c // n_own
            p_packed += (i_sample * n_rows * n_row + o_c % n_own)[None, :]
        else:
            p_packed += i_b * n_rows * n_row + o_c[None, :]
        p_packed += o_to[:, None] * n_row
        tl.store(
            p_packed, b_x.T.to(p_packed.dtype.element_ty), mask=m_l[:, None] & m_c[None, :]
        )  # fmt: skip

    @triton.jit(do_not_specialize=["programs_x", *UNSPECIALIZED])
    def _pack_kernel(
        p_x, p_y, p_packed_x, p_packed_y, p_largest_x, p_largest_y, p_scale, p_places_x, p_places_y,
        programs_x, n_channels_x, n_l_x, s_picture_x, s_channel_x, s_pixel_x, n_plane_x, pictures_x,
        n_rows_x, n_own_x, n_row_x, n_channels_y, n_l_y, s_picture_y, s_channel_y, s_pixel_y,
        n_plane_y, pictures_y, n_rows_y, n_own_y, n_row_y, SCALED: tl.constexpr,
        SMALLEST: tl.constexpr, EXPONENT: tl.constexpr, PLACED_X: tl.constexpr,
        PLACED_Y: tl.constexpr, GROUPED_X: tl.constexpr, GROUPED_Y: tl.constexpr,
        BLOCK_L: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    ):  # fmt: skip
        i_program = tl.program_id(0)
        if i_program < programs_x:
            _pack_tile(
                p_x, p_packed_x, p_largest_x, p_places_x, i_program, n_channels_x, n_l_x,
                s_picture_x, s_channel_x, s_pixel_x, n_plane_x, pictures_x, n_rows_x, n_own_x,
                n_row_x, PLACED_X, GROUPED_X, SCALED, BLOCK_L, BLOCK_X, SMALLEST, EXPONENT,
            )  # fmt: skip
            if SCALED:
                n_tiles = tl.cdiv(n_l_x, BLOCK_L) * tl.cdiv(n_channels_x, BLOCK_X) * pictures_x
                if i_program % n_tiles == 0:
                    i_b = i_program // n_tiles
                    e_x = _exponent_of(tl.load(p_largest_x + i_b), SMALLEST, EXPONENT)
                    e_y = _exponent_of(tl.load(p_largest_y + i_b), SMALLEST, EXPONENT)
                    # Finite, so that nothing is left of a sample whose coefficient is 0.
                    scale = tl.minimum(_power_of_two(e_x) * _power_of_two(e_y), 1e38)
                    tl.store(p_scale + i_b, scale)
        else:
            _pack_tile(
                p_y, p_packed_y, p_largest_y, p_places_y, i_program - programs_x, n_channels_y,
                n_l_y, s_picture_y, s_channel_y, s_pixel_y, n_plane_y, pictures_y, n_rows_y,
                n_own_y, n_row_y, PLACED_Y, GROUPED_Y, SCALED, BLOCK_L, BLOCK_Y, SMALLEST, EXPONENT,
            )  # fmt: skip
