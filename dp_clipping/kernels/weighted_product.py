"""Clipped sum of a linear layer from its factors, without any sample's gradient in memory.

    Σ_i c_i Σ_t y_it a_itᵀ  [d, p] in float32, over the samples with c_i > 0

One matrix product over all tokens of all samples would do if the coefficients were 1. Scaling y in
16 bit would round it, by more than what is left of tokens that cancel; a second accumulator for
each sample's own product does not fit beside the first. So the one accumulator holds the sum in
units of the current sample's coefficient:

    S ← S · (c_{i-1} / c_i) + Σ_t y_it a_itᵀ,   and at the end S · c_last

Samples come in ascending order of c, so the ratio is at most 1 and nothing overflows. Those with
c = 0 come first and are not read at all: what they hold may not be finite.

Traffic: y and a about once, d·p float32 values written. Operations: those of the weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dp_clipping.kernels.tiles import Tile, describe, is_described, readable, triton

if triton is not None:
    import triton.language as tl

    from dp_clipping.kernels.tiles import _load_tile, _tile_of

GROUP = 8
TILES = {
    2: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(128, 256, 64, 8, 4),
        Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    4: (Tile(64, 64, 32, 4, 3), Tile(128, 64, 16, 8, 3), Tile(32, 64, 32, 4, 3)),
}  # fmt: skip


@dataclass(frozen=True)
class Ascending:
    """Coefficients in the order that the kernel takes samples in; all on the device.

    Attributes:
        order: [B] int32, sample numbers by ascending coefficient.
        ratio: [B] float32, each coefficient's predecessor over it.
        first: [1] int32, how many are zero.
        last: [1] float32, the largest.
    """

    order: Tensor
    ratio: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, coefficients: Tensor) -> Ascending:
        """From c [B] float32, not negative, B at least 1."""
        c, order = coefficients.sort()
        before = torch.cat((c.new_zeros(1), c[:-1]))
        ratio = torch.where(c > 0, before / c, 0.0)
        return cls(order.int(), ratio, (c <= 0).sum(0, keepdim=True).int(), c[-1:])


def weighted_product(y: Tensor, a: Tensor, weights: Ascending, tile: Tile | None = None) -> Tensor:
    """Σ_i c_i y_iᵀ a_i: [d, p] float32.

    Args:
        y: [B, T, d], float32, bfloat16 or float16, any strides.
        a: [B, T, p] of the same dtype.
    """
    y, a = readable(y), readable(a)
    batch_size, tokens, outputs = y.shape
    inputs = a.shape[2]
    tile = tile or TILES[y.element_size()][0]
    total = y.new_empty(outputs, inputs, dtype=torch.float32)
    count = triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    if not (batch_size and tokens and count):
        return total.zero_()
    described = is_described(y) and is_described(a)
    y_source, a_source = y, a
    if described:
        y_source = describe(y, (tile.depth, tile.rows))
        a_source = describe(a, (tile.depth, tile.columns))
    _weighted_product_kernel[(count,)](
        y_source, a_source, total, weights.order, weights.ratio, weights.first, weights.last,
        batch_size, tokens, outputs, inputs, y.stride(0), y.stride(1), a.stride(0), a.stride(1),
        DESCRIBED=described, EXACT=y.element_size() == 4, GROUP=GROUP,
        BLOCK_D=tile.rows, BLOCK_P=tile.columns, BLOCK_T=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return total


def weighted_product_plain(y: Tensor, a: Tensor, coefficients: Tensor) -> Tensor:
    """The plain twin, in float64, rounded once."""
    good = coefficients > 0
    y, a = y[good].double(), a[good].double()
    return torch.einsum("btd,btp,b->dp", y, a, coefficients[good].double()).float()


if triton is not None:
    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["B", "T"])
    def _weighted_product_kernel(
        y, a, p_total, p_order, p_ratio, p_first, p_last, B, T, D, P, s_yb, s_yt, s_ab, s_at,
        DESCRIBED: tl.constexpr, EXACT: tl.constexpr, GROUP: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_d, i_p = _tile_of(tl.program_id(0), tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P), GROUP)
        o_d, o_p = i_d * BLOCK_D, i_p * BLOCK_P
        b_total = tl.zeros((BLOCK_D, BLOCK_P), tl.float32)
        for i in range(tl.load(p_first), B):
            i_b = tl.load(p_order + i)
            b_total *= tl.load(p_ratio + i)
            for o_t in range(0, T, BLOCK_T):
                b_y = _load_tile(y, i_b, o_t, o_d, T, D, s_yb, s_yt, DESCRIBED, BLOCK_T, BLOCK_D)
                b_a = _load_tile(a, i_b, o_t, o_p, T, P, s_ab, s_at, DESCRIBED, BLOCK_T, BLOCK_P)
                if EXACT:
                    b_total = tl.dot(b_y.T, b_a, b_total, input_precision="ieee")
                else:
                    b_total = tl.dot(b_y.T, b_a, b_total)
        b_total *= tl.load(p_last)
        o_rows, o_columns = o_d + tl.arange(0, BLOCK_D), o_p + tl.arange(0, BLOCK_P)
        p_tile = p_total + o_rows[:, None].to(tl.int64) * P + o_columns[None, :]
        tl.store(p_tile, b_total, mask=(o_rows[:, None] < D) & (o_columns[None, :] < P))
