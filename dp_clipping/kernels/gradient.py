"""A linear layer's per-sample gradients and the norms of exactly the rounded values, in one pass.

    G_i = Σ_t y_it a_itᵀ  [d, p],  stored in 16 bit;  n_i² = Σ (stored values)²

Each program accumulates a tile of one sample's G in float32 registers, rounds it, squares what it
rounded and adds up the squares. A norm taken afterwards would read all of G again, and a norm of
the unrounded values could be below that of what is summed later.

Traffic: y and a are read about once from memory (tiles meet in the second-level cache), B·d·p
values are written. Operations: 2·B·T·d·p, those of the ordinary weight gradient.

Without storing, the same loop is `input_length`: the norm accumulated over tokens with nothing
materialised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dp_clipping.kernels.tiles import Tile, describe, is_described, readable, triton

if triton is not None:
    import triton.language as tl

    from dp_clipping.kernels.tiles import _load_tile, _tile_of

GROUP = 8
TILES = {  # bytes of an element -> the choice that needs no tuning, first, and others worth a try
    2: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(256, 128, 64, 8, 3),
        Tile(128, 256, 64, 8, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    4: (Tile(64, 64, 32, 4, 3), Tile(128, 64, 16, 8, 3), Tile(32, 64, 32, 4, 3)),
}  # fmt: skip


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of G. A sum over tokens may exceed float16's largest number."""
    return torch.float32 if dtype == torch.float16 else dtype


def gradient_and_squares(
    y: Tensor, a: Tensor, tile: Tile | None = None, store: bool = True
) -> tuple[Tensor | None, Tensor]:
    """G [B, d, p] in `stored_dtype` (None unless `store`) and squared norms [B] float32.

    Args:
        y: output gradients [B, T, d], float32, bfloat16 or float16, any strides.
        a: inputs [B, T, p] of the same dtype.
    """
    y, a = readable(y), readable(a)
    batch_size, tokens, outputs = y.shape
    inputs = a.shape[2]
    tile = tile or TILES[y.element_size()][0]
    dtype = stored_dtype(y.dtype)
    gradients = y.new_empty(batch_size, outputs, inputs, dtype=dtype) if store else None
    count = triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    if not (batch_size and tokens and count):
        if store:
            gradients.zero_()
        return gradients, y.new_zeros(batch_size, dtype=torch.float32)
    squares = y.new_empty(batch_size, count, dtype=torch.float32)
    described = is_described(y) and is_described(a)
    y_source, a_source = y, a
    if described:
        y_source = describe(y, (tile.depth, tile.rows))
        a_source = describe(a, (tile.depth, tile.columns))
    written = store and is_described(gradients)
    target = describe(gradients, (tile.rows, tile.columns)) if written else gradients
    _gradient_kernel[(count * batch_size,)](
        y_source, a_source, target, squares, tokens, outputs, inputs,
        y.stride(0), y.stride(1), a.stride(0), a.stride(1), count,
        DESCRIBED=described, STORE=store, WRITTEN=written, EXACT=y.element_size() == 4,
        GROUP=GROUP, BLOCK_D=tile.rows, BLOCK_P=tile.columns, BLOCK_T=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return gradients, squares.sum(1)


def gradient_and_squares_plain(
    y: Tensor, a: Tensor, store: bool = True
) -> tuple[Tensor | None, Tensor]:
    """The plain twin: products in float64, rounded once, and only if they are stored."""
    gradients = torch.bmm(y.double().mT, a.double())
    if store:
        gradients = gradients.to(stored_dtype(y.dtype))
    squares = gradients.double().square().sum((1, 2)).float()
    return (gradients if store else None), squares


if triton is not None:
    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["T", "n_tiles"])
    def _gradient_kernel(
        y, a, g, p_squares, T, D, P, s_yb, s_yt, s_ab, s_at, n_tiles,
        DESCRIBED: tl.constexpr, STORE: tl.constexpr, WRITTEN: tl.constexpr, EXACT: tl.constexpr,
        GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_b, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
        i_d, i_p = _tile_of(i_tile, tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P), GROUP)
        o_d, o_p = i_d * BLOCK_D, i_p * BLOCK_P
        b_g = tl.zeros((BLOCK_D, BLOCK_P), tl.float32)
        for o_t in range(0, T, BLOCK_T):
            b_y = _load_tile(y, i_b, o_t, o_d, T, D, s_yb, s_yt, DESCRIBED, BLOCK_T, BLOCK_D)
            b_a = _load_tile(a, i_b, o_t, o_p, T, P, s_ab, s_at, DESCRIBED, BLOCK_T, BLOCK_P)
            if EXACT:
                b_g = tl.dot(b_y.T, b_a, b_g, input_precision="ieee")
            else:
                b_g = tl.dot(b_y.T, b_a, b_g)
        if STORE:
            b_rounded = b_g.to(g.dtype.element_ty if not WRITTEN else g.dtype)
            if WRITTEN:
                g.store([i_b, o_d, o_p], b_rounded.reshape(1, BLOCK_D, BLOCK_P))
            else:
                o_rows, o_columns = o_d + tl.arange(0, BLOCK_D), o_p + tl.arange(0, BLOCK_P)
                p_g = g + tl.cast(i_b, tl.int64) * D * P
                p_g += o_rows[:, None].to(tl.int64) * P + o_columns[None, :]
                m_g = (o_rows[:, None] < D) & (o_columns[None, :] < P)
                tl.store(p_g, b_rounded, mask=m_g)
            b_g = b_rounded.to(tl.float32)
        tl.store(p_squares + tl.program_id(0), tl.sum(b_g * b_g))
