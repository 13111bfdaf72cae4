"""Computes squared norms of existing per-sample gradients, in one pass over them.

    n_i² = Σ G_i²  in float32, of exactly the values in G

Each program adds up the squares of one piece of one sample as a tree, so that no long chain of
additions loses what is small. Traffic: G read once.
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

    @triton.jit(do_not_specialize=["B"])
    def _vectors_kernel(p_rows, p_found, B, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
        p_row, i_b = p_rows + tl.program_id(0) // B * 3, tl.program_id(0) % B
        n, s_b = tl.load(p_row + 1), tl.load(p_row + 2)
        p_g = tl.load(p_row).to(tl.pointer_type(DTYPE)) + i_b.to(tl.int64) * s_b
        square = 0.0
        for o_first in range(0, n, BLOCK):
            o_n = o_first + tl.arange(0, BLOCK)
            b_g = tl.load(p_g + o_n, mask=o_n < n, other=0).to(tl.float32)
            square += tl.sum(b_g * b_g)
        tl.store(p_found + tl.program_id(0), square)
