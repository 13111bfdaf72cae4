"""Computes norms of convolutions with few positions from Gram matrices.

    ‖G_i‖² = Σ_{l,m} (p_il · p_im)(y_il · y_im)

p_il are the inputs that the taps meet at position l, which are read from x and never written. One
program takes one sample: both matrices, [L, L], stay in its registers. Operations: 2·B·L²·(taps·C +
O), which for 7 x 7 positions of 512 channels is a twentieth of forming G.

The terms may cancel, so the result comes with S = Σ_l ‖p_il‖‖y_il‖, what its error is relative to
(clipping/norms.py). A matrix unit's sums are cut off, not rounded: after CHUNK columns the
accumulator is added to another one and starts again from zero.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from dp_clipping.clipping.norms import GRAM_PIECE, LOST
from dp_clipping.kernels.convolution.geometry import (
    UNSPECIALIZED,
    VECTOR,
    Geometry,
    numbers,
    patches,
)
from dp_clipping.kernels.convolution.packing import Operand, scale_of
from dp_clipping.kernels.launch.tiles import launch, next_power_of_two, tl, triton

if triton is not None:
    from dp_clipping.kernels.convolution.geometry import _column_offsets, _row_pixels
    from dp_clipping.kernels.launch.tiles import _token_norms

MOST = 128  # positions of a sample
PAYS = 2  # operations of forming G, relative to those of the matrices, from which these are formed
CHUNK = GRAM_PIECE
DEPTH = 128  # columns of a step


@lru_cache(maxsize=1024)
def pays(
    given: torch.Size, left: torch.Size, itemsize: int, geometry: Geometry, batch_size: int
) -> bool:
    """Returns whether Gram matrices are the cheaper way to norms, and precise enough.

    Args:
        given, left: shapes of packed input and output gradient.
        itemsize: bytes of an element of them.
    """
    rows = left[0] // max(1, batch_size) * prod(left[1:-1])
    if geometry.groups > 1 or itemsize == 4 or not 1 < rows <= MOST:
        return False
    columns, outputs = prod(geometry.taps) * given[-1], left[-1]
    side = _side(rows)
    return rows * columns * outputs >= PAYS * side * side * (columns + outputs)


def gram_squares(
    x: Operand, y: Operand, geometry: Geometry, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Returns squared norms [B] and their scales S [B], float32.

    Args:
        x: the padded input, [N, D, H, W, C], 16 bit.
        y: the output gradients, [N, *positions, O]; a sample has at most MOST of them.
    """
    given, left = x.values, y.values
    pictures, inputs = len(given) // batch_size, given.shape[-1]
    found = given.new_empty(2, batch_size, dtype=torch.float32)
    places = numbers(geometry, given.shape[1:4], left.shape[1:4])
    side = _side(pictures * prod(left.shape[1:-1]))
    launch(
        _conv_gram_kernel, (batch_size,), (given, left, found),
        (batch_size, pictures, *places, inputs, left.shape[-1], 1),
        VECTOR=VECTOR if inputs % VECTOR == 0 else 1,
        BLOCK=side, DEPTH=DEPTH, CHUNK=CHUNK, LOST=LOST,
        num_warps=8 if side == MOST else 4, num_stages=3,  # with 4, registers do not suffice
    )  # fmt: skip
    squares, scales = found
    if x.largest is not None and y.largest is not None:
        factors = scale_of(x.largest) * scale_of(y.largest)
        squares, scales = squares * factors * factors, scales * factors
    return squares, scales


def gram_squares_plain(
    x: Tensor, y: Tensor, geometry: Geometry, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Reference implementation, in float64, rounded once; x [N, C, D, H, W] without padding."""
    found = patches(x.double(), geometry, y.shape[2:]).flatten(5).movedim(1, -1)
    rows = [
        z.reshape(batch_size, -1, z.shape[4:].numel()) for z in (found, y.double().movedim(1, -1))
    ]
    grams = [torch.bmm(z, z.mT) for z in rows]
    scales = prod(z.norm(dim=2) + z.shape[2] ** 0.5 * LOST for z in rows)
    return (grams[0] * grams[1]).sum((1, 2)).float(), scales.sum(1).float()


def _side(rows: int) -> int:
    return max(16, next_power_of_two(rows))


if triton is not None:

    @triton.jit(do_not_specialize=[n for n in UNSPECIALIZED if n != "share"])
    def _conv_gram_kernel(
        p_x, p_y, p_found, batch_size, pictures, D, H, W, Z, Y, X,
        stride_d, stride_h, stride_w, dil_d, dil_h, dil_w, taps_d, taps_h, taps_w,
        n_inputs, n_outputs, n_groups, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
        DEPTH: tl.constexpr, CHUNK: tl.constexpr, LOST: tl.constexpr,
    ):  # fmt: skip
        i_b = tl.program_id(0).to(tl.int64)
        n_columns, n_rows = taps_d * taps_h * taps_w * n_inputs, pictures * Z * Y * X
        o_l = tl.arange(0, BLOCK)
        m_l = o_l < n_rows
        o_pixels = _row_pixels(
            tl.minimum(o_l, n_rows - 1), D, H, W, Z, Y, X, stride_d, stride_h, stride_w
        )
        p_rows = p_x + i_b * pictures * D * H * W * n_inputs + o_pixels[:, None] * n_inputs
        b_x = tl.zeros((BLOCK, BLOCK), tl.float32)
        b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        for o_n in range(0, n_columns, DEPTH):
            o_own = o_n + tl.arange(0, DEPTH)
            o_columns = _column_offsets(
                o_own, n_columns, 0, n_inputs, n_groups, H, W, dil_d, dil_h, dil_w, taps_h, taps_w,
                VECTOR,
            )  # fmt: skip
            b_own = tl.load(
                p_rows + o_columns[None, :], mask=(o_own < n_columns)[None, :], other=0
            )  # fmt: skip
            b_part = tl.dot(b_own, b_own.T, b_part)
            if ((o_n + DEPTH) % CHUNK == 0) | (o_n + DEPTH >= n_columns):
                b_x += b_part
                b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        p_y += i_b * n_rows * n_outputs
        m_diagonal = o_l[:, None] == o_l[None, :]
        b_sums, b_squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        for o_o in range(0, n_outputs, DEPTH):
            o_own = o_o + tl.arange(0, DEPTH)
            m_own = m_l[:, None] & (o_own < n_outputs)[None, :]
            b_own = tl.load(
                p_y + o_l[:, None] * n_outputs + o_own[None, :], mask=m_own, other=0
            )  # fmt: skip
            b_part = tl.dot(b_own, b_own.T, b_part)
            if ((o_o + DEPTH) % CHUNK == 0) | (o_o + DEPTH >= n_outputs):
                b_sums += tl.sum(b_x * b_part, axis=1)  # beyond the last row b_part is zero
                b_squares += tl.sum(tl.where(m_diagonal, b_part, 0.0), axis=1)
                b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        tl.store(p_found + i_b, tl.sum(b_sums))
        b_norms = _token_norms(b_squares, n_outputs, LOST)
        b_norms *= _token_norms(
            tl.sum(tl.where(m_diagonal, b_x, 0.0), axis=1), n_columns, LOST
        )  # fmt: skip
        tl.store(p_found + batch_size + i_b, tl.sum(tl.where(m_l, b_norms, 0.0)))
