"""Per-sample gradients of the weights of RMSNorm and LayerNorm, and of the latter's bias.

    x̂_it = (x_it − mean_it) · rstd_it,   G_i = Σ_t y_it · x̂_it  [d],   for the bias Σ_t y_it  [d]

RMSNorm has no mean and no bias. Each program takes a piece of one sample's tokens and a block of
features; x̂ and the product exist in registers only. A few long samples of few features would leave
most of the device idle, so their tokens are split over programs, whose sums are added afterwards:
these are sums, not norms, so that any split will do.

Traffic: y and x are read once, pieces·B·d float32 values are written (twice that with a bias).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dp_clipping.kernels.tiles import ceil_div, readable, triton

if triton is not None:
    import triton.language as tl

BLOCK = 128  # features of a program
ELEMENTS = 2048  # values of y that a program loads at a time
WARPS = 4
PROGRAMS = 1024  # fewer leave processors idle: pieces are made until there are as many
LEAST_STEPS = 4  # loads of a piece: shorter ones cost more in sums than they gain


def norm_weight_gradients(
    y: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None = None, with_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The weight's G [B, d] float32 and, if asked for, the bias's [B, d] float32.

    Args:
        y: output gradients [B, T, d], float32, bfloat16 or float16, any strides.
        x: inputs [B, T, d], likewise.
        rstd: [B, T] float32, of each token.
        mean: the same; None for RMSNorm.
    """
    y, x = readable(y), readable(x)
    batch_size, tokens, features = y.shape
    if not y.numel():
        zero = y.new_zeros(batch_size, features, dtype=torch.float32)
        return zero, zero.clone() if with_bias else None
    block = min(BLOCK, triton.next_power_of_2(features))
    rows = ELEMENTS // block
    blocks = ceil_div(features, block)
    piece, pieces = _split(tokens, rows, batch_size * blocks)
    shape = (1 + with_bias, pieces, batch_size, features)
    partial = y.new_empty(shape, dtype=torch.float32)
    rstd = rstd.contiguous()
    _norm_weights_kernel[(pieces * batch_size * blocks,)](
        y, x, rstd, rstd if mean is None else mean.contiguous(), partial,
        batch_size, tokens, features, y.stride(0), y.stride(1), x.stride(0), x.stride(1),
        piece, partial[0].numel(), MEAN=mean is not None, BIAS=with_bias,
        BLOCK_T=rows, BLOCK_D=block, num_warps=WARPS,
    )  # fmt: skip
    total = partial[:, 0] if pieces == 1 else partial.sum(1)
    return total[0], total[1] if with_bias else None


def _split(tokens: int, rows: int, programs: int) -> tuple[int, int]:
    """Tokens of a piece, a multiple of `rows`, and how many pieces; `programs` without a split."""
    wanted = ceil_div(PROGRAMS, programs)
    steps = max(ceil_div(ceil_div(tokens, rows), wanted), LEAST_STEPS)
    return steps * rows, ceil_div(tokens, steps * rows)


def norm_weight_gradients_plain(
    y: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None = None, with_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The plain twin, in float64, rounded once."""
    normalized = x.double()
    if mean is not None:
        normalized = normalized - mean.double()[..., None]
    normalized = normalized * rstd.double()[..., None]
    weights = (y.double() * normalized).sum(1).float()
    return weights, y.double().sum(1).float() if with_bias else None


if triton is not None:

    @triton.jit
    def _norm_weights_kernel(
        p_y, p_x, p_rstd, p_mean, p_partial, B, T, D, s_yb, s_yt, s_xb, s_xt, n_piece, n_results,
        MEAN: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        n_blocks = tl.cdiv(D, BLOCK_D)
        i_row, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        i_piece, i_b = i_row // B, (i_row % B).to(tl.int64)
        o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        b_weight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        b_bias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for i_t in range(i_piece * n_piece, min((i_piece + 1) * n_piece, T), BLOCK_T):
            o_t = i_t + tl.arange(0, BLOCK_T)
            m_t = o_t < T
            m_tile = m_t[:, None] & (o_d[None, :] < D)
            o_row = o_t[:, None].to(tl.int64)
            b_y = tl.load(p_y + i_b * s_yb + o_row * s_yt + o_d[None, :], mask=m_tile, other=0)
            b_x = tl.load(p_x + i_b * s_xb + o_row * s_xt + o_d[None, :], mask=m_tile, other=0)
            b_y, b_x = b_y.to(tl.float32), b_x.to(tl.float32)
            if MEAN:
                b_x -= tl.load(p_mean + i_b * T + o_t, mask=m_t, other=0).to(tl.float32)[:, None]
            b_rstd = tl.load(p_rstd + i_b * T + o_t, mask=m_t, other=0).to(tl.float32)
            b_weight += b_y * (b_x * b_rstd[:, None])
            if BIAS:
                b_bias += b_y
        p_own = p_partial + tl.cast(i_row, tl.int64) * D + o_d
        tl.store(p_own, tl.sum(b_weight, axis=0), mask=o_d < D)
        if BIAS:
            tl.store(p_own + n_results, tl.sum(b_bias, axis=0), mask=o_d < D)
