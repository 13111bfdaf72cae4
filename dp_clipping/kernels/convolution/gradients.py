"""Computes per-sample gradients of convolutions, norms and clipped sums on matrix units.

All taps together are one linear layer, whose matrix of inputs is never
written: its row l and its column (k, c) are at the sum of two offsets in x, one of l and one of
(k, c).

`gradients_and_squares` accumulates a tile of one sample's G in float32 registers and squares the
values that it stores. Without storing it computes norms only; `weighted_sum` then accumulates the
same tiles again, in the same order, and adds each times its coefficient. So what is summed is what
was normed, in TensorFloat-32 too.

Operations: 2·B·L·taps·C·O, those of the ordinary weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.kernels.convolution.geometry import UNSPECIALIZED, VECTOR, Geometry, numbers
from dp_clipping.kernels.convolution.packing import EXPONENT, SMALLEST, Operand
from dp_clipping.kernels.launch.tiles import ceil_div, launch, next_power_of_two, tl, triton

if triton is not None:
    from dp_clipping.kernels.convolution.geometry import _column_offsets, _row_pixels
    from dp_clipping.kernels.convolution.packing import _product_of_scales

PROGRAMS = 1056  # eight for each processor of an H200, over which a sum divides its samples


def gradients_and_squares(
    x: Operand, y: Operand, geometry: Geometry, batch_size: int, store: bool | Tensor = True
) -> tuple[Any, Tensor]:
    """Returns G [B, O, taps, C / groups], None unless `store`, and its squared norms [B] float32.

    G is in `stored_dtype`, float32 where that is what was packed.

    Args:
        x: the padded input, [N, D, H, W, C].
        y: the output gradients, [N, *positions, O].
        store: whether G is stored; or where, contiguous.
    """
    given, left, is_scaled = x.values, y.values, x.largest is not None
    work = work_of(given.shape, left.shape, given.dtype, is_scaled, geometry, batch_size)
    gradients = store if isinstance(store, Tensor) else None
    if store is True:
        gradients = given.new_empty(work.shape, dtype=work.stored)
    squares = given.new_empty(batch_size, work.tiles, dtype=torch.float32)
    if not work.is_empty:
        largest = (x.largest, y.largest) if is_scaled else (given, left)
        launch(
            _conv_gradient_kernel, (batch_size * work.tiles,),
            (given, left, *largest, gradients, squares), (batch_size, *work.numbers),
            STORE=gradients is not None, **work.constants, num_warps=4, num_stages=3,
        )  # fmt: skip
    else:
        squares.zero_()
        if gradients is not None:
            gradients.zero_()
    return gradients, squares.sum(1) if work.tiles > 1 else squares[:, 0]


def weighted_sum(x: Operand, y: Operand, geometry: Geometry, coefficients: Tensor) -> Tensor:
    """Returns Σ_i c_i G_i [O, C / groups, taps] float32, over the samples with c_i > 0.

    Args:
        x, y: as `gradients_and_squares` takes them.
        coefficients: c [B] float32.
    """
    given, left, is_scaled = x.values, y.values, x.largest is not None
    batch_size, outputs = coefficients.shape[0], left.shape[-1]
    work = work_of(given.shape, left.shape, given.dtype, is_scaled, geometry, batch_size)
    _, _, taps, inputs = work.shape
    if work.is_empty:
        return coefficients.new_zeros(outputs, inputs, taps)
    splits = min(batch_size, max(1, PROGRAMS // work.tiles))
    share = -(-batch_size // splits)
    splits = -(-batch_size // share)
    parts = coefficients.new_empty(splits, outputs, inputs, taps)
    largest = (x.largest, y.largest) if is_scaled else (given, left)
    is_large = work.constants["BLOCK_O"] * work.constants["BLOCK_N"] > 64 * 128
    launch(
        _weighted_kernel, (splits * work.tiles,),
        (given, left, *largest, coefficients.contiguous(), parts),
        (batch_size, share, *work.numbers), **work.constants,
        num_warps=8 if is_large else 4, num_stages=3,
    )  # fmt: skip
    return parts.sum(0) if splits > 1 else parts[0]


@dataclass(frozen=True)
class Work:
    """Holds what follows from the shapes of a convolution's operands.

    Attributes:
        shape, stored, nbytes: of G [B, O, taps, C / groups].
        tiles: of a sample's G.
        is_empty: there is nothing to add up.
        numbers, constants: the arguments that its kernels share.
    """

    shape: tuple[int, int, int, int]
    stored: torch.dtype
    nbytes: int
    tiles: int
    is_empty: bool
    numbers: tuple[int, ...]
    constants: dict[str, int]


@lru_cache(maxsize=1024)
def work_of(
    given: torch.Size, left: torch.Size, dtype: torch.dtype, is_scaled: bool, geometry: Geometry,
    batch_size: int,
) -> Work:  # fmt: skip
    """Returns the work on packed operands of these shapes, in this dtype."""
    groups, pictures = geometry.groups, given[0] // max(1, batch_size)
    inputs, outputs, taps = given[-1] // groups, left[-1] // groups, prod(geometry.taps)
    columns, positions = taps * inputs, prod(left[1:-1])
    vector, block_o, block_n = _blocks(inputs, outputs, columns, dtype)
    tiles = tiles_of(given[-1], left[-1], geometry, dtype)
    places = numbers(geometry, given[1:4], left[1:4])
    constants = dict(
        VECTOR=vector, SCALED=is_scaled, SMALLEST=SMALLEST, EXPONENT=EXPONENT, BLOCK_O=block_o,
        BLOCK_N=block_n, BLOCK_L=32 if dtype.itemsize == 4 else 64,
    )  # fmt: skip
    is_empty = not (batch_size and pictures and positions and columns and outputs)
    shape, stored = (batch_size, left[-1], taps, inputs), stored_dtype(dtype)
    return Work(
        shape, stored, prod(shape) * stored.itemsize, tiles, is_empty,
        (pictures, *places, inputs, outputs, groups), constants,
    )  # fmt: skip


def tiles_of(inputs: int, outputs: int, geometry: Geometry, dtype: torch.dtype) -> int:
    """Returns how many programs compute a sample's G from operands of so many channels."""
    groups = geometry.groups
    inputs, outputs = inputs // groups, outputs // groups
    columns = prod(geometry.taps) * inputs
    _, block_o, block_n = _blocks(inputs, outputs, columns, dtype)
    return max(1, groups * ceil_div(outputs, block_o) * ceil_div(columns, block_n))


def _blocks(inputs: int, outputs: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns VECTOR, and the outputs and columns of G of a program."""
    wide, vector = dtype.itemsize == 4, VECTOR if inputs % VECTOR == 0 else 1
    most = 64 if wide or vector == 1 else 128
    return vector, _block(outputs, 64 if wide else 128), _block(columns, most)


def _block(size: int, most: int) -> int:
    return max(16, min(most, next_power_of_two(size)))


if triton is not None:

    @triton.jit
    def _place(i_tile, n_columns, n_outputs, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr):
        """Returns group, outputs and columns of a tile; neighbouring tiles share rows of y."""
        n_n, n_o = tl.cdiv(n_columns, BLOCK_N), tl.cdiv(n_outputs, BLOCK_O)
        o_n = i_tile % n_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_o = i_tile // n_n % n_o * BLOCK_O + tl.arange(0, BLOCK_O)
        return i_tile // (n_n * n_o), o_o, o_n

    @triton.jit
    def _offsets(i_tile, n_columns, n_outputs, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr):
        """Returns where a tile lies in G [groups · O, taps · C], and which elements exist."""
        i_g, o_o, o_n = _place(i_tile, n_columns, n_outputs, BLOCK_O, BLOCK_N)
        o_g = (i_g * n_outputs + o_o[:, None]) * n_columns + o_n[None, :]
        return o_g, (o_o[:, None] < n_outputs) & (o_n[None, :] < n_columns)

    @triton.jit
    def _product(
        p_x, p_y, o_columns, o_o, o_rows, n_rows, n_outputs, n_x, n_y, D, H, W, Z, Y, X,
        stride_d, stride_h, stride_w, b_g,
    ):  # fmt: skip
        """Adds the products of some rows to b_g. A missing row reads the last one, times zero."""
        o_pixels = _row_pixels(
            tl.minimum(o_rows, n_rows - 1), D, H, W, Z, Y, X, stride_d, stride_h, stride_w
        )
        b_x = tl.load(p_x + o_pixels[:, None] * n_x + o_columns[None, :])
        m_y = (o_rows < n_rows)[:, None] & (o_o < n_outputs)[None, :]
        b_y = tl.load(p_y + o_rows[:, None] * n_y + o_o[None, :], mask=m_y, other=0)
        return tl.dot(b_y.T, b_x, b_g, input_precision="ieee")

    @triton.jit(do_not_specialize=[n for n in UNSPECIALIZED if n != "share"])
    def _conv_gradient_kernel(
        p_x, p_y, p_largest_x, p_largest_y, p_g, p_squares, batch_size, pictures, D, H, W, Z, Y, X,
        stride_d, stride_h, stride_w, dil_d, dil_h, dil_w, taps_d, taps_h, taps_w,
        n_inputs, n_outputs, n_groups, VECTOR: tl.constexpr, SCALED: tl.constexpr,
        SMALLEST: tl.constexpr, EXPONENT: tl.constexpr, BLOCK_O: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, STORE: tl.constexpr,
    ):  # fmt: skip
        n_tiles = tl.num_programs(0) // batch_size
        i_b, i_tile = (tl.program_id(0) // n_tiles).to(tl.int64), tl.program_id(0) % n_tiles
        n_columns, n_rows = taps_d * taps_h * taps_w * n_inputs, pictures * Z * Y * X
        i_g, o_o, o_n = _place(i_tile, n_columns, n_outputs, BLOCK_O, BLOCK_N)
        n_x, n_y = n_inputs * n_groups, n_outputs * n_groups
        p_x += i_b * pictures * D * H * W * n_x
        p_y += i_b * n_rows * n_y + i_g * n_outputs
        o_columns = _column_offsets(
            o_n, n_columns, i_g, n_inputs, n_groups, H, W, dil_d, dil_h, dil_w, taps_h, taps_w,
            VECTOR,
        )  # fmt: skip
        b_g = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        for o_l in range(0, n_rows, BLOCK_L):
            b_g = _product(
                p_x, p_y, o_columns, o_o, o_l + tl.arange(0, BLOCK_L), n_rows, n_outputs, n_x, n_y,
                D, H, W, Z, Y, X, stride_d, stride_h, stride_w, b_g,
            )  # fmt: skip
        if SCALED:
            b_g *= _product_of_scales(p_largest_x, p_largest_y, i_b, SMALLEST, EXPONENT)
        o_g, m_g = _offsets(i_tile, n_columns, n_outputs, BLOCK_O, BLOCK_N)
        if STORE:
            b_rounded = b_g.to(p_g.dtype.element_ty)
            tl.store(p_g + i_b * n_outputs * n_groups * n_columns + o_g, b_rounded, mask=m_g)
            b_g = b_rounded.to(tl.float32)
        tl.store(p_squares + tl.program_id(0), tl.sum(tl.where(m_g, b_g * b_g, 0.0)))

    @triton.jit(do_not_specialize=UNSPECIALIZED)
    def _weighted_kernel(
        p_x, p_y, p_largest_x, p_largest_y, p_c, p_total, batch_size, share, pictures,
        D, H, W, Z, Y, X,
        stride_d, stride_h, stride_w, dil_d, dil_h, dil_w, taps_d, taps_h, taps_w,
        n_inputs, n_outputs, n_groups, VECTOR: tl.constexpr, SCALED: tl.constexpr,
        SMALLEST: tl.constexpr, EXPONENT: tl.constexpr, BLOCK_O: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    ):  # fmt: skip
        """Sums over several samples in one loop over blocks of rows, so that loads never pause."""
        n_tiles = tl.num_programs(0) // tl.cdiv(batch_size, share)
        i_split, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
        n_columns, n_rows = taps_d * taps_h * taps_w * n_inputs, pictures * Z * Y * X
        i_g, o_o, o_n = _place(i_tile, n_columns, n_outputs, BLOCK_O, BLOCK_N)
        n_x, n_y = n_inputs * n_groups, n_outputs * n_groups
        n_pixels = pictures * D * H * W
        p_y += i_g * n_outputs
        o_columns = _column_offsets(
            o_n, n_columns, i_g, n_inputs, n_groups, H, W, dil_d, dil_h, dil_w, taps_h, taps_w,
            VECTOR,
        )  # fmt: skip
        b_total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        b_g = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        i_first = i_split * share
        n_blocks = tl.cdiv(n_rows, BLOCK_L)
        for i in range(0, (tl.minimum(i_first + share, batch_size) - i_first) * n_blocks):
            i_b, i_block = i_first + i // n_blocks, i % n_blocks
            o_rows = i_block * BLOCK_L + tl.arange(0, BLOCK_L)
            i_from = i_b.to(tl.int64)
            b_g = _product(
                p_x + i_from * n_pixels * n_x, p_y + i_from * n_rows * n_y, o_columns, o_o, o_rows,
                n_rows, n_outputs, n_x, n_y, D, H, W, Z, Y, X, stride_d, stride_h, stride_w, b_g,
            )  # fmt: skip
            if i_block == n_blocks - 1:
                c = tl.load(p_c + i_b)
                if SCALED:
                    b_g *= _product_of_scales(p_largest_x, p_largest_y, i_b, SMALLEST, EXPONENT)
                b_total += tl.where(c > 0, c * b_g, 0.0)
                b_g = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        _, m_g = _offsets(i_tile, n_columns, n_outputs, BLOCK_O, BLOCK_N)
        n_g = tl.cast(n_outputs * n_groups, tl.int64) * n_columns
        o_g = (i_g * n_outputs + o_o[:, None]) * n_columns
        o_g += (o_n % n_inputs * (n_columns // n_inputs) + o_n // n_inputs)[None, :]
        tl.store(p_total + i_split * n_g + o_g, b_total, mask=m_g)
