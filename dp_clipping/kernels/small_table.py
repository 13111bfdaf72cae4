"""Computes per-sample gradients of an embedding with few rows by a one-hot matrix product.

    G_iv = Σ_t [id_it = v] y_it  [d]

A table of relative positions or of token types has some dozens of rows, and a sample has thousands
of tokens: G is smaller than the tokens, and sorting them, as `embedding` does, takes longer than
multiplying. A program takes CHUNK tokens of one sample; its one-hot matrix is made in registers.
The chunks' results are added in a fixed order, so that results do not vary.

Traffic: y and ids are read once, G [B, V, d] is written in float32, once for each chunk.
Operations: 2·B·T·V·d, at the rate of a matrix unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import ceil_div, launch, next_power_of_two, tl, triton

MOST = 128  # rows of the table
TOKENS = 4  # that there are at least for each of them
CHUNK = 2048  # tokens of a program
BLOCK_T, WIDEST, SMALLEST = 64, 64, 16  # tokens, and features, of a tile
WARPS = 4


def is_small(vocabulary: int, tokens: int) -> bool:
    """Returns whether a table has few rows beside its tokens [B, T]."""
    return 0 < vocabulary <= MOST and tokens >= TOKENS * vocabulary


def table_gradients(ids: Tensor, y: Tensor, vocabulary: int) -> Tensor:
    """Returns G [B, V, d] float32 of ids [B, T], int64 or int32, and output gradients y [B, T, d].

    Both with any strides; ids outside of the table count nowhere.
    """
    batch_size, tokens, features = y.shape
    chunks = max(1, ceil_div(tokens, CHUNK))
    parts = y.new_zeros(batch_size, chunks, vocabulary, features, dtype=torch.float32)
    if y.numel():
        block_d = min(WIDEST, max(SMALLEST, next_power_of_two(features)))
        grid = (batch_size * chunks * ceil_div(features, block_d),)
        launch(
            _table_kernel, grid, (ids, y, parts),
            (tokens, vocabulary, features, chunks, *ids.stride(), *y.stride()),
            EXACT=y.element_size() == 4, CHUNK=CHUNK, BLOCK_T=BLOCK_T, BLOCK_D=block_d,
            BLOCK_V=max(SMALLEST, next_power_of_two(vocabulary)), num_warps=WARPS,
        )  # fmt: skip
    return parts[:, 0] if chunks == 1 else parts.sum(1)


def table_gradients_plain(ids: Tensor, y: Tensor, vocabulary: int) -> Tensor:
    """Reference implementation, in float64, rounded once."""
    one_hot = (ids[..., None] == torch.arange(vocabulary, device=ids.device)).double()
    return torch.einsum("btv,btd->bvd", one_hot, y.double()).float()


if triton is not None:
    # Lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["T", "n_chunks"])
    def _table_kernel(
        p_ids, p_y, p_parts, T, V, D, n_chunks, s_ib, s_it, s_yb, s_yt, s_yd,
        EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        n_blocks = tl.cdiv(D, BLOCK_D)
        i_part, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        i_b, i_chunk = tl.cast(i_part // n_chunks, tl.int64), i_part % n_chunks
        o_v, o_d = tl.arange(0, BLOCK_V), i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        b_g = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        for o_t in range(i_chunk * CHUNK, min(i_chunk * CHUNK + CHUNK, T), BLOCK_T):
            o_n = o_t + tl.arange(0, BLOCK_T)
            o_n64 = o_n.to(tl.int64)
            b_id = tl.load(p_ids + i_b * s_ib + o_n64 * s_it, mask=o_n < T, other=-1)
            p_rows = p_y + i_b * s_yb + o_n64[:, None] * s_yt + o_d[None, :].to(tl.int64) * s_yd
            b_y = tl.load(p_rows, mask=(o_n[:, None] < T) & (o_d[None, :] < D), other=0)
            b_hot = (b_id[None, :] == o_v[:, None]).to(b_y.dtype)
            if EXACT:
                b_g = tl.dot(b_hot, b_y, b_g, input_precision="ieee")
            else:
                b_g = tl.dot(b_hot, b_y, b_g)
        p_out = p_parts + (tl.cast(i_part, tl.int64) * V + o_v[:, None]) * D + o_d[None, :]
        tl.store(p_out, b_g, mask=(o_v[:, None] < V) & (o_d[None, :] < D))
