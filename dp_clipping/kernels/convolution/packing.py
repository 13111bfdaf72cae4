"""Packs operands for the kernels: channels last, so that a row is contiguous, at a grid's places.

Matrix units take TensorFloat-32 operands in one layout only, which is not this one. So where
convolutions may use it, float32 operands are packed as float16, which has as many digits, after
each sample is scaled by a power of two: its largest value is rounded to 2⁻¹¹ of itself, and what is
below 2⁻³⁸ of that becomes zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_clipping.kernels.convolution.geometry import Packed, Target, places_of_pixels
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

if triton is not None:
    from dp_clipping.kernels.launch.tiles import _row_of

EXPONENT = 14  # of the largest value in float16
SMALLEST = -100  # exponent of a sample's largest value, below which it is scaled no further
BLOCK = 64  # channels and pixels that a program packs
PACKED_BYTES = 1 << 26  # of operands that are packed at a time, if nothing else keeps them,
MOST_PACKED_BYTES = 1 << 28  # and the same in memory that backward has freed
TOGETHER = 1 << 22  # values from which on packed operands share no launch with those of other uses
MOST_ROWS = 128  # operands of a launch
ALIGNED = 16  # values: strides that are multiples of it are read in 16 bytes
# Of a row: the operand, its result, the places of its pixels or 0; the largest values of its
# samples, those of the other operand, and the scale that it writes or 0; then `_How.numbers`.
WORDS = 16

Use = tuple[Tensor, Tensor, Target, Target]
"""Operands x [N, C, D, H, W] and y [N, O, ..], and how each of them is packed."""


def pack(x: Tensor, y: Tensor, to_x: Target, to_y: Target, tf32: bool = False) -> Packed:
    """Calls `pack_all` for one use."""
    return pack_all([(x, y, to_x, to_y)], tf32)[0]


def pack_all(uses: list[Use], tf32: bool = False) -> list[Packed]:
    """Packs operands in one dtype: float32, bfloat16 or float16; and empties `uses`.

    Float32 becomes scaled float16 if TensorFloat-32 may be used. Few launches serve small operands.
    What large ones are packed from is freed before others are packed.
    """
    found: list[Packed] = []
    uses.reverse()
    while uses:
        several: list[tuple[tuple[Tensor, _How], tuple[Tensor, _How]]] = []
        size, fills = 0, False
        while uses and (not several or size < TOGETHER) and 2 * len(several) < MOST_ROWS:
            x, y, to_x, to_y = uses.pop()
            is_scaled = tf32 and x.dtype == torch.float32
            of_x = _how(x.shape, x.stride(), is_scaled, to_x, x.device)
            of_y = _how(y.shape, y.stride(), is_scaled, to_y, y.device)
            several.append(((x, of_x), (y, of_y)))
            size += of_x.size + of_y.size
            fills = fills or of_x.fills or of_y.fills
        new = x.new_zeros if fills else x.new_empty  # for all at once
        memory = new(size, dtype=torch.float16 if is_scaled else x.dtype)
        del x, y
        found += _pack_small(several, memory, is_scaled)
    return found


def _pack_small(
    uses: list[tuple[tuple[Tensor, _How], tuple[Tensor, _How]]], memory: Tensor, is_scaled: bool
) -> list[Packed]:
    """Packs operands into memory that all of them have together."""
    found: list[Packed] = []
    rows: dict[tuple, tuple[list[int], list[int]]] = {}  # words, and first programs, by constants
    read: list[Any] = []  # what a launch reads, and nothing else may hold
    dtype, start = uses[0][0][0].dtype, 0
    for use in uses:
        scale, addresses = None, ((0, 0, 0), (0, 0, 0))
        if is_scaled:
            samples = use[0][0].shape[0] // use[0][1].pictures
            largest = []
            for operand, _ in use:
                if operand.numel():
                    operand = operand.unflatten(0, (samples, -1))
                    largest.append(torch.linalg.vector_norm(operand, torch.inf, (1, 2, 3, 4, 5)))
                else:
                    largest.append(operand.new_zeros(samples))
            scale = operand.new_empty(samples)
            of_x, of_y = largest[0].data_ptr(), largest[1].data_ptr()
            addresses = (of_x, of_y, scale.data_ptr()), (of_y, of_x, 0)
            read.append(largest)
        results = []
        for (operand, how), own in zip(use, addresses, strict=True):
            if how.keeps:
                results.append(operand.movedim(1, -1).view(how.shape))
                continue
            operand = operand.contiguous() if how.copies else operand
            result = memory.as_strided(how.shape, how.strides, start)
            results.append(result)
            start += how.size
            if not how.programs:
                continue
            read.append(operand)
            place = 0
            if how.places is not None:
                place = held(how.places).data_ptr() if _holders else how.places.data_ptr()
            kind = how.kinds[operand.data_ptr() % ALIGNMENT > 0]
            words, starts = rows.setdefault(kind, ([], [0]))
            words += operand.data_ptr(), result.data_ptr(), place, *own, *how.numbers
            starts.append(starts[-1] + how.programs)
        # `Packed(..)` would call a function in Python.
        found.append(tuple.__new__(Packed, (*results, scale)))
    for kind, (words, starts) in rows.items():
        table = kept_table_on(memory.device, (*starts, *words))
        launch(
            _pack_kernel, (starts[-1],), (table[len(starts) :], table[: len(starts)]),
            (len(starts) - 1,), GIVEN=dtype, PACKED=memory.dtype, SCALED=is_scaled, **dict(kind),
            SMALLEST=SMALLEST, EXPONENT=EXPONENT, BLOCK_L=BLOCK, MOST=MOST_ROWS, WORDS=WORDS,
            num_warps=4,
        )  # fmt: skip
    return found


def packed_at_a_time(freed: int) -> int:
    """Returns how many bytes of operands are packed at a time, if nothing else keeps them.

    They are a power of two: the division of a batch into pieces is looked up by them.

    Args:
        freed: bytes that backward has freed, of which they may take half.
    """
    half = 1 << max(0, freed // 2).bit_length() >> 1
    return min(MOST_PACKED_BYTES, max(PACKED_BYTES, half))


class _How(NamedTuple):
    """Says how an operand of one shape and strides is packed.

    Attributes:
        pictures: of a sample.
        shape, strides: of the result.
        size: elements of memory that it takes.
        keeps: the operand already lies so, and is its own result.
        copies: it is copied first, since its pixels are not at equal distances.
        fills: zeros are between what is written.
        places: those of a picture's pixels (`places_of_pixels`), where it is not packed pixel by
            pixel.
        programs, numbers: of its row in the launch.
        kinds: the constants of its launch, and those for an operand whose address is not aligned.
    """

    pictures: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    size: int
    keeps: bool
    copies: bool
    fills: bool
    places: Tensor | None
    programs: int
    numbers: tuple[int, ...]
    kinds: tuple[tuple, tuple]


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


@lru_cache(maxsize=2048)
def _how(
    given: torch.Size, strides: tuple[int, ...], is_scaled: bool, to: Target, device: torch.device
) -> _How:
    pictures, channels, *pixels = given
    count, block = prod(pixels), min(BLOCK, next_power_of_two(max(1, channels)))
    # With padding and a stride the grid may have the sizes of the pixels, and other places.
    is_moved = (*pixels,) != to.grid.sizes or prod(to.grid.phases) > 1
    is_placed = is_moved or any(to.padding)
    is_padded = to.groups * to.width != channels
    pixel = _distance(pixels, strides[2:])
    places = (channels * count, count, 1) if pixel is None else (*strides[:2], pixel)
    is_last = _lie_at((pictures, channels, count), places, (channels * count, 1, channels))
    keeps = is_last and not (is_scaled or is_placed or is_padded or to.groups > 1)
    shape = to.shape(pictures)
    _, rows, width = shape
    by_picture, by_channel, by_pixel = places
    unit = 1 if by_pixel == 1 else 2 if by_channel == 1 else 0
    strided = {1: by_channel, 2: by_pixel}.get(unit, 1)
    is_aligned = by_picture % ALIGNED == 0 and strided % ALIGNED == 0
    kinds = [
        (
            ("GROUPED", to.groups > 1), ("UNIT", unit), ("ALIGNED", ALIGNED if aligned else 1),
            ("ROW", gcd(width, ALIGNED)), ("BLOCK_C", block),
        )
        for aligned in (is_aligned, False)
    ]  # fmt: skip
    return _How(
        to.pictures, shape, (rows * width, width, 1),
        0 if keeps else ceil_div(prod(shape), ALIGNED) * ALIGNED, keeps, pixel is None,
        not keeps and (is_placed or is_padded),
        _places_on(device, (*pixels,), to) if is_placed else None,
        pictures * ceil_div(count, BLOCK) * ceil_div(channels, block),
        (
            channels, count, *places, prod(to.grid.sizes) if is_placed else count, to.pictures,
            rows, channels // to.groups, width,
        ),
        (kinds[0], kinds[1]),
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

    @triton.jit(do_not_specialize=["n_rows"])
    def _pack_kernel(
        p_words, p_starts, n_rows, GIVEN: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr,
        GROUPED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, ROW: tl.constexpr,
        BLOCK_C: tl.constexpr, SMALLEST: tl.constexpr, EXPONENT: tl.constexpr,
        BLOCK_L: tl.constexpr, MOST: tl.constexpr, WORDS: tl.constexpr,
    ):  # fmt: skip
        """Copies a tile of [C, D, H, W] of one picture to its places."""
        i_row, i_program = _row_of(p_starts, n_rows, MOST)
        p_row = p_words + i_row * WORDS
        p_x = tl.multiple_of(tl.load(p_row).to(tl.pointer_type(GIVEN)), ALIGNED)
        p_packed = tl.multiple_of(tl.load(p_row + 1).to(tl.pointer_type(PACKED)), 16)
        at_places = tl.load(p_row + 2)
        n_channels, n_l = tl.load(p_row + 6).to(tl.int32), tl.load(p_row + 7).to(tl.int32)
        s_picture = tl.multiple_of(tl.load(p_row + 8), ALIGNED)
        s_channel, s_pixel = tl.load(p_row + 9), tl.load(p_row + 10)
        if UNIT == 1:
            s_channel, s_pixel = tl.multiple_of(s_channel, ALIGNED), 1
        if UNIT == 2:
            s_channel, s_pixel = 1, tl.multiple_of(s_pixel, ALIGNED)
        n_plane, pictures = tl.load(p_row + 11).to(tl.int32), tl.load(p_row + 12).to(tl.int32)
        n_rows_packed, n_own = tl.load(p_row + 13), tl.load(p_row + 14).to(tl.int32)
        n_row = tl.multiple_of(tl.load(p_row + 15), ROW)
        n_tiles_l, n_tiles_c = tl.cdiv(n_l, BLOCK_L), tl.cdiv(n_channels, BLOCK_C)
        i_rest, i_l = i_program // n_tiles_l, i_program % n_tiles_l
        i_n, i_c = (i_rest // n_tiles_c).to(tl.int64), i_rest % n_tiles_c
        i_b, i_picture = i_n // pictures, (i_n % pictures).to(tl.int32)
        o_l = i_l * BLOCK_L + tl.arange(0, BLOCK_L)
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
        m_l, m_c = o_l < n_l, o_c < n_channels
        p_x += i_n * s_picture + o_l[None, :].to(tl.int64) * s_pixel
        p_x += o_c[:, None].to(tl.int64) * s_channel
        b_x = tl.load(p_x, mask=m_c[:, None] & m_l[None, :], other=0)
        if SCALED:
            p_largest = tl.load(p_row + 3).to(tl.pointer_type(tl.float32))
            exponent = _exponent_of(tl.load(p_largest + i_b), SMALLEST, EXPONENT)
            b_x *= _power_of_two(-exponent)
            p_other = tl.load(p_row + 4).to(tl.pointer_type(tl.float32))
            other = _exponent_of(tl.load(p_other + i_b), SMALLEST, EXPONENT)
            # Finite, so that nothing is left of a sample whose coefficient is 0.
            scale = tl.minimum(_power_of_two(exponent) * _power_of_two(other), 1e38)
            at_scale = tl.load(p_row + 5)
            is_first = i_program % (n_tiles_l * n_tiles_c * pictures) == 0
            p_scale = at_scale.to(tl.pointer_type(tl.float32)) + i_b
            tl.store(p_scale, scale, mask=is_first & (at_scale != 0))
        p_places = at_places.to(tl.pointer_type(tl.int32)) + o_l
        o_to = tl.load(p_places, mask=m_l & (at_places != 0), other=-1)
        o_to = tl.where(at_places != 0, o_to, o_l)
        m_l = m_l & (o_to >= 0)
        o_to += i_picture * n_plane
        if GROUPED:
            i_sample = i_b * (n_channels // n_own) + o_c // n_own
            p_packed += (i_sample * n_rows_packed * n_row + o_c % n_own)[None, :]
        else:
            p_packed += i_b * n_rows_packed * n_row + o_c[None, :]
        p_packed += o_to[:, None] * n_row
        tl.store(
            p_packed, b_x.T.to(p_packed.dtype.element_ty), mask=m_l[:, None] & m_c[None, :]
        )  # fmt: skip
