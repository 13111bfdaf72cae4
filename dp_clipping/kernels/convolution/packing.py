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

from dp_clipping.kernels.convolution.geometry import Packed, Target, gaps_of, places_of_pixels
from dp_clipping.kernels.launch.tiles import (
    ALIGNMENT,
    _holders,
    ceil_div,
    held,
    kept_table_on,
    launch,
    next_power_of_two,
    tl,
    triton,
)

EXPONENT = 14  # of the largest value in float16
SMALLEST = -100  # exponent of a sample's largest value, below which it is scaled no further
BLOCK = 64  # channels and pixels that a program packs
PARTS, LARGEST_BLOCK = 8, 4096  # of a sample whose largest value is sought; values loaded at a time
ALL_OTHERS = (1, 2, 3, 4, 5)  # dimensions than that of samples
PACKED_BYTES = 1 << 26  # of operands that are packed at a time, if nothing else keeps them,
MOST_PACKED_BYTES = 1 << 28  # and the same in memory that backward has freed
UNSPECIALIZED = [
    f"{name}_{operand}"
    for operand in "xy"
    for name in ("n_own_programs", "n_gaps", "n_plane", "pictures", "n_rows")
]


def largest_of(operands: Sequence[Tensor], samples: int) -> Sequence[Tensor]:
    """Returns the largest magnitudes in parts of each sample, [samples, PARTS] float32 of each.

    Args:
        operands: [N, C, D, H, W] float32 each, N a multiple of `samples`; one launch serves them.
    """
    words: list[int] = []
    found = operands[0].new_empty(len(operands), samples, PARTS)
    rows = found.unbind(0)
    for x, row in zip(operands, rows, strict=True):
        if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last_3d):
            words += x.data_ptr(), x.numel() // samples, row.data_ptr()
        else:  # samples with gaps, or of another order
            largest = torch.linalg.vector_norm(x.unflatten(0, (samples, -1)), torch.inf, ALL_OTHERS)
            row.copy_(largest[:, None])
    if words:
        launch(
            _largest_kernel, (samples * PARTS, len(words) // 3),
            (kept_table_on(found.device, tuple(words)),), PARTS=PARTS, BLOCK=LARGEST_BLOCK,
            num_warps=8,
        )  # fmt: skip
    return rows


def pack(
    x: Tensor, y: Tensor, to_x: Target, to_y: Target, tf32: bool = False,
    largest: Sequence[Tensor] = (),
) -> Packed:  # fmt: skip
    """Packs both by one launch. Float32 becomes scaled float16 if TensorFloat-32 may be used.

    Args:
        x, y: [N, C, D, H, W] and [N, O, ..] in float32, bfloat16 or float16.
        largest: `largest_of` both; none: a launch more looks for them where they are needed.
    """
    is_scaled = tf32 and x.dtype == torch.float32 and x.numel() > 0 and y.numel() > 0
    work = _work_of(x.shape, y.shape, x.stride(), y.stride(), is_scaled, to_x, to_y, x.device)
    if _holders:
        held(work.tables)
    shapes, keeps = work.shapes, work.keeps
    if all(keeps):
        x, y = x.movedim(1, -1), y.movedim(1, -1)
        return tuple.__new__(Packed, (x.view(shapes[0]), y.view(shapes[1]), None))
    scale = None
    norms: Sequence[Any] = (None, None)
    if is_scaled:
        samples = x.shape[0] // to_x.pictures
        norms = largest or largest_of((x, y), samples)
        scale = x.new_empty(samples)
    memory = x.new_empty(work.size, dtype=torch.float16 if is_scaled else x.dtype)  # of both
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
            _pack_kernel, (work.programs,), (x, y, *results, *norms, scale, *work.tables),
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
        tables: of each operand `places_of_pixels` and `gaps_of`, or None where it is packed pixel
            by pixel.
    """

    shapes: tuple[tuple[int, int, int], tuple[int, int, int]]
    strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    start: int
    size: int
    keeps: tuple[bool, bool]
    copies: tuple[bool, bool]
    tables: tuple[Tensor | None, ...]
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
def _tables_on(device: torch.device, pixels: tuple[int, ...], to: Target) -> tuple[Tensor, Tensor]:
    """Returns `places_of_pixels` and `gaps_of`, which batches of all sizes share."""
    places = places_of_pixels(pixels, to)
    return places.to(device), gaps_of(places, to).to(device)


@lru_cache(maxsize=1024)
def _work_of(
    x: torch.Size, y: torch.Size, strides_x: tuple[int, ...], strides_y: tuple[int, ...],
    is_scaled: bool, to_x: Target, to_y: Target, device: torch.device,
) -> _Work:  # fmt: skip
    """Returns the work on operands of such shapes and strides."""
    keeps, copies, counts = [], [], []
    tables: list[Tensor | None] = []
    numbers: list[int] = []
    constants: dict[str, Any] = dict(
        PARTS=PARTS, SMALLEST=SMALLEST, EXPONENT=EXPONENT, BLOCK_L=BLOCK
    )
    for name, (pictures, channels, *pixels), strides, to in (
        ("X", x, strides_x, to_x), ("Y", y, strides_y, to_y),
    ):  # fmt: skip
        count, columns = prod(pixels), to.groups * to.width
        block = min(BLOCK, next_power_of_two(columns))
        # With padding and a stride the grid may have the sizes of the pixels, and other places.
        is_moved = (*pixels,) != to.grid.sizes or prod(to.grid.phases) > 1
        is_placed = is_moved or any(to.padding)
        pixel = _distance(pixels, strides[2:])
        copies.append(pixel is None)
        places = (channels * count, count, 1) if pixel is None else (*strides[:2], pixel)
        is_last = _lie_at((pictures, channels, count), places, (channels * count, 1, channels))
        is_other = is_scaled or is_placed or columns != channels or to.groups > 1
        keeps.append(is_last and not is_other)
        own = _tables_on(device, (*pixels,), to) if is_placed else (None, None)
        n_gaps = 0 if own[1] is None else len(own[1])
        samples, rows, _ = to.shape(pictures)
        of_pixels, of_gaps = (
            0 if keeps[-1] else n * ceil_div(each, BLOCK) * ceil_div(columns, block)
            for n, each in ((pictures, count), (samples // to.groups, n_gaps))
        )
        counts.append(of_pixels + of_gaps)
        tables += own
        numbers += of_pixels, n_gaps, count, *places, prod(to.grid.sizes) if is_placed else count
        numbers += to.pictures, rows, channels // to.groups, to.width, columns
        constants |= {
            f"PLACED_{name}": is_placed, f"GROUPED_{name}": to.groups > 1, f"BLOCK_{name}": block,
        }  # fmt: skip
    shapes = to_x.shape(x[0]), to_y.shape(y[0])
    rows_at = [(count * width, width, 1) for _, count, width in shapes]
    sizes = [0 if keep else prod(shape) for keep, shape in zip(keeps, shapes, strict=True)]
    start = ceil_div(sizes[0], ALIGNMENT) * ALIGNMENT
    return _Work(
        shapes, (rows_at[0], rows_at[1]), start, start + sizes[1], (keeps[0], keeps[1]),
        (copies[0], copies[1]), tuple(tables), sum(counts), (counts[0], *numbers), constants,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _largest_kernel(p_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
        i_b, i_part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
        p_row = p_rows + 3 * tl.program_id(1)
        n = tl.load(p_row + 1)
        p_x = tl.load(p_row).to(tl.pointer_type(tl.float32)) + i_b * n
        p_largest = tl.load(p_row + 2).to(tl.pointer_type(tl.float32))
        n_part = tl.cdiv(tl.cdiv(n, PARTS), BLOCK) * BLOCK
        b_largest = tl.zeros((BLOCK,), tl.float32)
        for o_first in range(i_part * n_part, tl.minimum((i_part + 1) * n_part, n), BLOCK):
            o_x = o_first + tl.arange(0, BLOCK)
            b_largest = tl.maximum(b_largest, tl.abs(tl.load(p_x + o_x, mask=o_x < n, other=0)))
        tl.store(p_largest + tl.program_id(0), tl.max(b_largest))

    @triton.jit
    def _exponent_of(
        p_largest, i_b, PARTS: tl.constexpr, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr
    ):  # fmt: skip
        """Returns log₂ of what a sample is divided by, from the bits of its largest magnitude."""
        largest = tl.max(tl.load(p_largest + i_b * PARTS + tl.arange(0, PARTS)))
        exponent = (largest.to(tl.int32, bitcast=True) >> 23 & 255) - 126
        return tl.maximum(exponent, SMALLEST) - EXPONENT

    @triton.jit
    def _power_of_two(exponent):
        """Returns 2 to the power of -126 to 127, from its bits."""
        return (exponent + 127 << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _pack_tile(
        p_x, p_packed, p_largest, p_places, p_gaps, i_program, n_programs, n_gaps, n_l, s_picture,
        s_channel, s_pixel, n_plane, pictures, n_rows, n_own, n_row, n_columns,
        PLACED: tl.constexpr, GROUPED: tl.constexpr, SCALED: tl.constexpr, BLOCK_L: tl.constexpr,
        BLOCK_C: tl.constexpr, PARTS: tl.constexpr, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr,
    ):  # fmt: skip
        """Copies a tile of [C, D, H, W] of one picture to its places, or writes zeros between."""
        n_tiles_c = tl.cdiv(n_columns, BLOCK_C)
        o_c = i_program % n_tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < n_columns
        i_group, o_own = tl.zeros_like(o_c), o_c  # the column's group, and its number in it
        if GROUPED:
            i_group, o_own = o_c // n_row, o_c % n_row
        p_packed += i_group.to(tl.int64)[None, :] * n_rows * n_row + o_own[None, :]
        s_sample = tl.cast(tl.cdiv(n_columns, n_row), tl.int64) * n_rows * n_row
        i_tile = i_program // n_tiles_c
        i_first_gap = n_programs // n_tiles_c
        if PLACED and i_tile >= i_first_gap:
            i_gap, n_gap_tiles = i_tile - i_first_gap, tl.cdiv(n_gaps, BLOCK_L)
            o_gap = i_gap % n_gap_tiles * BLOCK_L + tl.arange(0, BLOCK_L)
            m_gap = o_gap < n_gaps
            o_row = tl.load(p_gaps + o_gap, mask=m_gap, other=0)
            p_zero = p_packed + i_gap // n_gap_tiles * s_sample + o_row[:, None] * n_row
            b_zero = tl.zeros((BLOCK_L, BLOCK_C), p_packed.dtype.element_ty)
            tl.store(p_zero, b_zero, mask=m_gap[:, None] & m_c[None, :])
        else:
            n_tiles = tl.cdiv(n_l, BLOCK_L)
            i_n = (i_tile // n_tiles).to(tl.int64)
            i_b, i_picture = i_n // pictures, (i_n % pictures).to(tl.int32)
            o_l = i_tile % n_tiles * BLOCK_L + tl.arange(0, BLOCK_L)
            m_l, m_own = o_l < n_l, m_c & (o_own < n_own)
            p_from = p_x + i_n * s_picture + o_l[None, :].to(tl.int64) * s_pixel
            p_from += (i_group * n_own + o_own)[:, None].to(tl.int64) * s_channel
            b_x = tl.load(p_from, mask=m_own[:, None] & m_l[None, :], other=0)
            if SCALED:
                b_x *= _power_of_two(-_exponent_of(p_largest, i_b, PARTS, SMALLEST, EXPONENT))
            o_to = o_l
            if PLACED:
                o_to = tl.load(p_places + o_l, mask=m_l, other=-1)
                m_l = o_to >= 0
            o_to += i_picture * n_plane
            p_to = p_packed + i_b * s_sample + o_to[:, None] * n_row
            tl.store(p_to, b_x.T.to(p_packed.dtype.element_ty), mask=m_l[:, None] & m_c[None, :])

    @triton.jit(do_not_specialize=["programs_x", *UNSPECIALIZED])
    def _pack_kernel(
        p_x, p_y, p_packed_x, p_packed_y, p_largest_x, p_largest_y, p_scale, p_places_x, p_gaps_x,
        p_places_y, p_gaps_y, programs_x, n_own_programs_x, n_gaps_x, n_l_x, s_picture_x,
        s_channel_x, s_pixel_x, n_plane_x, pictures_x, n_rows_x, n_own_x, n_row_x, n_columns_x,
        n_own_programs_y, n_gaps_y, n_l_y, s_picture_y, s_channel_y, s_pixel_y, n_plane_y,
        pictures_y, n_rows_y, n_own_y, n_row_y, n_columns_y, SCALED: tl.constexpr,
        PARTS: tl.constexpr, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr, PLACED_X: tl.constexpr,
        PLACED_Y: tl.constexpr, GROUPED_X: tl.constexpr, GROUPED_Y: tl.constexpr,
        BLOCK_L: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    ):  # fmt: skip
        i_program = tl.program_id(0)
        if i_program < programs_x:
            _pack_tile(
                p_x, p_packed_x, p_largest_x, p_places_x, p_gaps_x, i_program, n_own_programs_x,
                n_gaps_x, n_l_x, s_picture_x, s_channel_x, s_pixel_x, n_plane_x, pictures_x,
                n_rows_x, n_own_x, n_row_x, n_columns_x, PLACED_X, GROUPED_X, SCALED, BLOCK_L,
                BLOCK_X, PARTS, SMALLEST, EXPONENT,
            )  # fmt: skip
            if SCALED:
                n_tiles = tl.cdiv(n_l_x, BLOCK_L) * tl.cdiv(n_columns_x, BLOCK_X) * pictures_x
                if (i_program < n_own_programs_x) & (i_program % n_tiles == 0):
                    i_b = i_program // n_tiles
                    e_x = _exponent_of(p_largest_x, i_b, PARTS, SMALLEST, EXPONENT)
                    e_y = _exponent_of(p_largest_y, i_b, PARTS, SMALLEST, EXPONENT)
                    # Finite, so that nothing is left of a sample whose coefficient is 0.
                    scale = tl.minimum(_power_of_two(e_x) * _power_of_two(e_y), 1e38)
                    tl.store(p_scale + i_b, scale)
        else:
            _pack_tile(
                p_y, p_packed_y, p_largest_y, p_places_y, p_gaps_y, i_program - programs_x,
                n_own_programs_y, n_gaps_y, n_l_y, s_picture_y, s_channel_y, s_pixel_y, n_plane_y,
                pictures_y, n_rows_y, n_own_y, n_row_y, n_columns_y, PLACED_Y, GROUPED_Y, SCALED,
                BLOCK_L, BLOCK_Y, PARTS, SMALLEST, EXPONENT,
            )  # fmt: skip
