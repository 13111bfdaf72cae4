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
    Geometry,
    Layout,
    Packed,
    patches,
    places_of,
)
from dp_clipping.kernels.launch.tiles import kept_table_on, launch, next_power_of_two, tl, triton

if triton is not None:
    from dp_clipping.kernels.launch.tiles import _token_norms

MOST = 128  # positions of a sample
PAYS = 2  # operations of forming G, relative to those of the matrices, from which these are formed
CHUNK = GRAM_PIECE
DEPTH = 128  # columns of a step


@lru_cache(maxsize=1024)
def pays(layout: Layout, itemsize: int) -> bool:
    """Returns whether Gram matrices are the cheaper way to norms, and precise enough.

    Args:
        itemsize: bytes of an element of packed operands.
    """
    positions = layout.to_x.pictures * prod(layout.positions)
    if layout.geometry.groups > 1 or itemsize == 4 or not 1 < positions <= MOST:
        return False
    columns, side = prod(layout.geometry.taps) * layout.to_x.width, _side(positions)
    outputs = layout.to_y.width
    return positions * columns * outputs >= PAYS * side * side * (columns + outputs)


def gram_squares(packed: Packed, layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns squared norms [B] and their scales S [B], float32.

    Args:
        packed: operands in 16 bit; a sample has at most MOST positions.
    """
    x, y, scale = packed
    samples = x.shape[0]
    to_x, to_y, positions = layout.to_x, layout.to_y, layout.positions
    found = x.new_empty(2, samples, dtype=torch.float32)
    places = places_of(layout.geometry, to_x.grid, to_x.pictures)
    side = _side(to_x.pictures * prod(positions))
    launch(
        _conv_gram_kernel, (samples,), (x, y, found, kept_table_on(x.device, places)),
        (
            samples, len(places), to_x.pictures, *positions, *to_x.grid.sizes, x.shape[1],
            y.shape[1], to_x.width, to_y.width,
        ),
        BLOCK=side, DEPTH=DEPTH, CHUNK=CHUNK, LOST=LOST,
        num_warps=8 if side == MOST else 4, num_stages=3,  # with 4, registers do not suffice
    )  # fmt: skip
    squares, scales = found.unbind(0)
    if scale is not None:
        squares, scales = squares * scale * scale, scales * scale
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

    @triton.jit(
        do_not_specialize=[
            "B", "n_taps", "pictures", "Z", "Y", "X", "n_d", "n_h", "n_w", "n_rows_x",
            "n_rows_y",
        ]
    )  # fmt: skip
    def _conv_gram_kernel(
        p_x, p_y, p_found, p_places, B, n_taps, pictures, Z, Y, X, n_d, n_h, n_w, n_rows_x,
        n_rows_y, n_inputs, n_outputs, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
        CHUNK: tl.constexpr, LOST: tl.constexpr,
    ):  # fmt: skip
        i_b = tl.program_id(0).to(tl.int64)
        n_l, n_plane = Z * Y * X, n_d * n_h * n_w
        n_rows = pictures * n_l
        o_l = tl.arange(0, BLOCK)
        m_l = o_l < n_rows
        i_l = o_l % n_l
        o_rows = o_l // n_l * n_plane + (i_l // (Y * X) * n_h + i_l // X % Y) * n_w + i_l % X
        p_rows = p_x + i_b * n_rows_x * n_inputs + o_rows[:, None] * n_inputs
        n_blocks = tl.cdiv(n_inputs, DEPTH)
        n_steps = n_taps * n_blocks
        place = tl.load(p_places).to(tl.int32)
        b_x = tl.zeros((BLOCK, BLOCK), tl.float32)
        b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        for i in range(0, n_steps):
            o_own = i % n_blocks * DEPTH + tl.arange(0, DEPTH)
            m_own = m_l[:, None] & (o_own < n_inputs)[None, :]
            b_own = tl.load(p_rows + (place * n_inputs + o_own)[None, :], mask=m_own, other=0)
            # Of the next step: what is loaded from a place read in its own step is late.
            place = tl.load(p_places + min(i + 1, n_steps - 1) // n_blocks).to(tl.int32)
            b_part = tl.dot(b_own, b_own.T, b_part)
            if ((i + 1) % (CHUNK // DEPTH) == 0) | (i + 1 == n_steps):
                b_x += b_part
                b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        p_y += i_b * n_rows_y * n_outputs
        m_diagonal = o_l[:, None] == o_l[None, :]
        b_sums, b_squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        for o_o in range(0, n_outputs, DEPTH):
            o_own = o_o + tl.arange(0, DEPTH)
            m_own = m_l[:, None] & (o_own < n_outputs)[None, :]
            b_own = tl.load(
                p_y + o_rows[:, None] * n_outputs + o_own[None, :], mask=m_own, other=0
            )  # fmt: skip
            b_part = tl.dot(b_own, b_own.T, b_part)
            if ((o_o + DEPTH) % CHUNK == 0) | (o_o + DEPTH >= n_outputs):
                b_sums += tl.sum(b_x * b_part, axis=1)  # beyond the last row b_part is zero
                b_squares += tl.sum(tl.where(m_diagonal, b_part, 0.0), axis=1)
                b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        tl.store(p_found + i_b, tl.sum(b_sums))
        b_norms = _token_norms(b_squares, n_outputs, LOST)
        b_norms *= _token_norms(
            tl.sum(tl.where(m_diagonal, b_x, 0.0), axis=1), n_taps * n_inputs, LOST
        )  # fmt: skip
        tl.store(p_found + B + i_b, tl.sum(tl.where(m_l, b_norms, 0.0)))
