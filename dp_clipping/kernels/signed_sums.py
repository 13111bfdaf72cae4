"""Sums of each sample's numbers under fixed random signs, and their norm, in one pass.

    out_i = (Σ_n s_1[n] · x_i[n], ..., Σ_n s_4[n] · x_i[n], ‖x_i‖)

The sign of number n is the product of that of its place in a piece of `PIECE` numbers and that of
the piece. Each program adds up one piece. Traffic: x is read once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import ceil_div, launch, tl, triton

SIGNS = 4
PIECE, PIECES = 1 << 12, 1 << 20


def signed_sums(rows: Tensor) -> Tensor:
    """Returns the sums and the norm [B, SIGNS + 1] of each of the rows, float32.

    Args:
        rows: [B, N] in float32, bfloat16 or float16, each row contiguous.
    """
    size, length = rows.shape
    pieces = ceil_div(length, PIECE)
    shape = (size, pieces, SIGNS + 1) if pieces > 1 else (size, SIGNS + 1)
    sums = rows.new_empty(shape, dtype=torch.float32)
    launch(
        _signed_sums_kernel, (pieces, size), (rows, _bits(rows.device), sums),
        (length, rows.stride(0), pieces), SIGNS=SIGNS, PIECE=PIECE, PIECES=PIECES,
        IS_WHOLE=pieces == 1, num_warps=4,
    )  # fmt: skip
    if pieces > 1:
        sums = sums.sum(1)
        sums[:, SIGNS:].sqrt_()
    return sums


def signed_sums_plain(rows: Tensor) -> Tensor:
    """Reference implementation of `signed_sums`, in the dtype of the rows.

    A product of matrices with many short rows is fast on a GPU; one with few long rows is not.
    """
    size, length = rows.shape
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if length < PIECE:
        sums = rows @ _short_signs(rows.dtype, rows.device)[:length]
        return torch.cat((sums, norms), 1)
    signs = _signs(rows.dtype, rows.device)
    whole = length // PIECE * PIECE
    pieces = rows[:, :whole].view(size, -1, PIECE) @ signs[:, :PIECE].t()
    weights = signs[:, PIECE:][:, : pieces.shape[1] + 1].t()
    rest = rows[:, whole:] @ signs[:, : length - whole].t()
    sums = (pieces * weights[:-1]).sum(1) + rest * weights[-1]
    return torch.cat((sums, norms), 1)


@lru_cache(maxsize=8)
def _bits(device: torch.device) -> Tensor:
    """Returns [PIECE + PIECES] bytes, of which each low bit is one sign."""
    draw = torch.Generator().manual_seed(0)
    count = PIECE + PIECES
    return torch.randint(1 << SIGNS, (count,), generator=draw, dtype=torch.uint8, device="cpu").to(
        device
    )


@lru_cache(maxsize=8)
def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the signs [SIGNS, PIECE + PIECES] as 1 and -1."""
    bits = _bits(device)
    return torch.stack([1 - 2 * (bits >> k & 1).to(dtype) for k in range(SIGNS)])


@lru_cache(maxsize=8)
def _short_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the signs [PIECE, SIGNS] of the first piece's numbers."""
    bits = _bits(device)[: PIECE + 1]  # the last one is the piece's
    signs = torch.stack([1 - 2 * (bits >> k & 1).to(dtype) for k in range(SIGNS)], 1)
    return signs[:PIECE] * signs[PIECE]


if triton is not None:

    @triton.jit(do_not_specialize=["n_numbers", "s_row", "n_pieces"])
    def _signed_sums_kernel(
        p_rows, p_bits, p_sums, n_numbers, s_row, n_pieces, SIGNS: tl.constexpr,
        PIECE: tl.constexpr, PIECES: tl.constexpr, IS_WHOLE: tl.constexpr,
    ):  # fmt: skip
        i_piece = tl.program_id(0).to(tl.int64)
        i_row = tl.program_id(1).to(tl.int64)
        o_n = tl.arange(0, PIECE)
        m_n = i_piece * PIECE + o_n < n_numbers
        b_x = tl.load(p_rows + i_row * s_row + i_piece * PIECE + o_n, mask=m_n, other=0)
        b_x = b_x.to(tl.float32)
        b_bits = tl.load(p_bits + o_n).to(tl.int32)
        bits = tl.load(p_bits + PIECE + i_piece).to(tl.int32)
        p_sums += (i_row * n_pieces + i_piece) * (SIGNS + 1)
        for k in tl.static_range(SIGNS):
            is_minus = ((b_bits ^ bits) >> k) & 1
            tl.store(p_sums + k, tl.sum(tl.where(is_minus == 1, -b_x, b_x)))
        square = tl.sum(b_x * b_x)
        tl.store(p_sums + SIGNS, tl.sqrt_rn(square) if IS_WHOLE else square)
