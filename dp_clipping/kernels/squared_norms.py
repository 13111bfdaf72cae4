"""Computes squared norms of existing per-sample gradients, in one pass over them.

    n_i² = Σ G_i²  in float32, of exactly the values in G

Each program adds up the squares of one piece of one sample as a tree, so that no long chain of
additions loses what is small. Traffic: G read once.

Of a linear layer's use on one token, G_i = y_i a_iᵀ, the squared norm is the product of those of
its factors, in float64: no factor is too small or too large for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import kept_table_on, launch, tl, triton

BLOCK = 4096
SHORT = 1024  # of vectors
WARPS = 8


def squared_norms(gradients: Tensor) -> Tensor:
    """Returns [B] float32 from G [B, ...], float32, bfloat16 or float16."""
    gradients = gradients.contiguous()
    batch_size, n = len(gradients), gradients.shape[1:].numel()
    pieces = -(-n // BLOCK)
    if not (batch_size and n):
        return gradients.new_zeros(batch_size, dtype=torch.float32)
    partial = gradients.new_empty(batch_size, pieces, dtype=torch.float32)
    launch(
        _squared_norms_kernel, (batch_size * pieces,), (gradients, partial), (n, pieces),
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return partial[:, 0] if pieces == 1 else partial.sum(1)


def squares_of_vectors(gradients: Sequence[Tensor]) -> Tensor:
    """Returns `squared_norms` of several G [B, n_l] of one dtype, [L, B] float32, in one launch."""
    first, words = gradients[0], []
    batch_size = first.shape[0]
    found = first.new_empty(len(gradients), batch_size, dtype=torch.float32)
    if batch_size:
        gradients = [g if g.stride(1) == 1 else g.contiguous() for g in gradients]
        for g in gradients:
            words += [g.data_ptr(), g.shape[1], g.stride(0)]
        launch(
            _vectors_kernel, (len(gradients) * batch_size,),
            (kept_table_on(first.device, tuple(words)), found), (batch_size,), DTYPE=first.dtype,
            BLOCK=BLOCK if max(words[1::3]) > SHORT else SHORT, num_warps=WARPS,
        )  # fmt: skip
    return found


def squares_of_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns `accumulation.product_squares` of y [B, d] and a [B, p], [L, B] float32.

    Args:
        pairs: y and a of several layers, of one dtype and B; one launch serves them.
    """
    first, words = pairs[0][0], []
    batch_size = first.shape[0]
    found = first.new_empty(len(pairs), batch_size, dtype=torch.float32)
    if batch_size:
        operands = [x if x.stride(1) == 1 else x.contiguous() for pair in pairs for x in pair]
        for x in operands:
            words += [x.data_ptr(), x.shape[1], x.stride(0)]
        launch(
            _products_kernel, (len(pairs) * batch_size,),
            (kept_table_on(first.device, tuple(words)), found), (batch_size,), DTYPE=first.dtype,
            BLOCK=BLOCK if max(words[1::3]) > SHORT else SHORT, num_warps=WARPS,
        )  # fmt: skip
    return found


def squared_norms_plain(gradients: Tensor) -> Tensor:
    """Reference implementation of `squared_norms`, in float64, rounded once."""
    shape = gradients.shape
    return gradients.reshape(shape[0], shape[1:].numel()).double().square().sum(1).float()


if triton is not None:

    @triton.jit(do_not_specialize=["pieces"])
    def _squared_norms_kernel(p_g, p_partial, n, pieces, BLOCK: tl.constexpr):
        i_b, i_piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
        o_n = i_piece.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_g = tl.load(p_g + i_b.to(tl.int64) * n + o_n, mask=o_n < n, other=0).to(tl.float32)
        tl.store(p_partial + tl.program_id(0), tl.sum(b_g * b_g))

    @triton.jit
    def _square_of(p_row, i_b, DTYPE: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr):
        """Returns the square of a vector of sample i_b, which has a row of the launch's table."""
        n, s_b = tl.load(p_row + 1), tl.load(p_row + 2)
        p_g = tl.load(p_row).to(tl.pointer_type(DTYPE)) + i_b.to(tl.int64) * s_b
        square = tl.zeros((), SUMMED)
        for o_first in range(0, n, BLOCK):
            o_n = o_first + tl.arange(0, BLOCK)
            b_g = tl.load(p_g + o_n, mask=o_n < n, other=0).to(SUMMED)
            square += tl.sum(b_g * b_g)
        return square

    @triton.jit(do_not_specialize=["B"])
    def _vectors_kernel(p_rows, p_found, B, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
        p_row, i_b = p_rows + tl.program_id(0) // B * 3, tl.program_id(0) % B
        tl.store(p_found + tl.program_id(0), _square_of(p_row, i_b, DTYPE, tl.float32, BLOCK))

    @triton.jit(do_not_specialize=["B"])
    def _products_kernel(p_rows, p_found, B, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
        p_row, i_b = p_rows + tl.program_id(0) // B * 6, tl.program_id(0) % B
        left = _square_of(p_row, i_b, DTYPE, tl.float64, BLOCK)
        right = _square_of(p_row + 3, i_b, DTYPE, tl.float64, BLOCK)
        infinity = float("inf")
        # As `accumulation.product_squares` says of a square that float32 does not hold.
        is_large = tl.maximum(left, right).to(tl.float32) == infinity
        found = tl.where(is_large, infinity, (left * right).to(tl.float32))
        tl.store(p_found + tl.program_id(0), found)
