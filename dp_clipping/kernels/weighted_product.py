"""Computes the clipped sum of a linear layer from its factors; stores no sample's gradient.

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

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_clipping.kernels.launch.grouped_launch import (
    MOST_ROWS,
    WORDS,
    Operands,
    Pair,
    describe,
    launches,
    operands_of,
    table,
)
from dp_clipping.kernels.launch.tiles import Tile, launch, tl, triton
from dp_clipping.kernels.launch.tuning import best_for_pairs
from dp_clipping.kernels.sorted_coefficients import SortedCoefficients

if triton is not None:
    from dp_clipping.kernels.launch.grouped_launch import _open
    from dp_clipping.kernels.launch.tiles import _load_tile, _row_of, _tile_of

GROUP = 8
TILES = {
    2: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(128, 256, 64, 8, 4),
        Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    4: (Tile(64, 64, 32, 4, 3), Tile(128, 64, 16, 8, 3), Tile(32, 64, 32, 4, 3)),
}  # fmt: skip


def weighted_products(
    pairs: Sequence[Pair],
    weights: SortedCoefficients,
    groups: Sequence[int],
    tile: Tile | None = None,
) -> list[Tensor]:
    """Returns Σ_i c_i y_iᵀ a_i of each pair: [d, p] float32.

    Args:
        pairs: y [B, T, d] and a [B, T, p], float32, bfloat16 or float16, any strides. Few launches
            serve those that are alike.
        groups: which of the K clipping groups each pair belongs to.
    """
    found: list = [None] * len(pairs)
    for numbers in launches(pairs):
        operands = operands_of([pairs[n] for n in numbers])
        launched = _launch(operands, weights, [groups[n] for n in numbers], tile)
        for number, result in zip(numbers, launched, strict=True):
            found[number] = result
    return found


def weighted_product(
    y: Tensor, a: Tensor, weights: SortedCoefficients, tile: Tile | None = None
) -> Tensor:
    """Calls `weighted_products` for one layer."""
    return weighted_products([(y, a)], weights, [0], tile)[0]


def _launch(
    operands: Operands, weights: SortedCoefficients, groups: list[int], tile: Tile | None
) -> list[Tensor]:
    pairs, shapes, described = operands.pairs, operands.shapes, operands.described
    y, _ = pairs[0]
    batch_size, tokens, _ = y.shape
    if not (batch_size and tokens and any(map(all, shapes))):
        return [y.new_zeros(shape, dtype=torch.float32) for shape in shapes]
    tile = tile or best_for_pairs(
        "weighted_product", pairs, described, TILES,
        lambda tile: _launch(operands, weights, groups, tile),
    )  # fmt: skip
    totals = [y.new_empty(shape, dtype=torch.float32) for shape in shapes]
    counts = [-(-d // tile.rows) * -(-p // tile.columns) for d, p in shapes]
    shared = dict(
        EXACT=y.element_size() == 4, GROUP=GROUP, BLOCK_D=tile.rows, BLOCK_P=tile.columns,
        BLOCK_T=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if len(pairs) == 1 and described:
        _, a = pairs[0]
        _weighted_product_kernel[(counts[0],)](
            describe(y, (tile.depth, tile.rows)), describe(a, (tile.depth, tile.columns)),
            totals[0], weights.order, weights.ratio, weights.first, weights.last, groups[0],
            batch_size, tokens, y.shape[2], a.shape[2], **shared,
        )  # fmt: skip
    else:
        rows = table(operands, totals, counts, groups)
        sorted_ = weights.order, weights.ratio, weights.first, weights.last
        launch(
            _weighted_products_kernel, (rows.programs,), (rows.words, rows.starts, *sorted_),
            (len(pairs), batch_size, tokens), DTYPE=y.dtype, DESCRIBED=described,
            MOST=MOST_ROWS, WORDS=WORDS, **shared,
        )  # fmt: skip
    return totals


def weighted_product_plain(y: Tensor, a: Tensor, coefficients: Tensor) -> Tensor:
    """Reference implementation of `weighted_product`, in float64, rounded once."""
    good = coefficients > 0
    y, a = y[good].double(), a[good].double()
    return torch.einsum("btd,btp,b->dp", y, a, coefficients[good].double()).float()


if triton is not None:

    @triton.jit
    def _weighted_tile(
        y, a, p_total, p_order, p_ratio, p_first, p_last, o_d, o_p, B, T, D, P,
        s_yb, s_yt, s_ab, s_at, DESCRIBED: tl.constexpr, EXACT: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        """Returns a tile of the sum from (o_d, o_p) on."""
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
        p_total += o_rows[:, None].to(tl.int64) * P + o_columns[None, :]
        tl.store(p_total, b_total, mask=(o_rows[:, None] < D) & (o_columns[None, :] < P))

    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["i_group", "B", "T"])
    def _weighted_product_kernel(
        y, a, p_total, p_order, p_ratio, p_first, p_last, i_group, B, T, D, P,
        EXACT: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_d, i_p = _tile_of(tl.program_id(0), tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P), GROUP)
        _weighted_tile(
            y, a, p_total, p_order + i_group * B, p_ratio + i_group * B, p_first + i_group,
            p_last + i_group, i_d * BLOCK_D, i_p * BLOCK_P, B, T, D, P, 0, 0, 0, 0, True, EXACT,
            BLOCK_D, BLOCK_P, BLOCK_T,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["n_rows", "B", "T"])
    def _weighted_products_kernel(
        p_rows, p_starts, p_order, p_ratio, p_first, p_last, n_rows, B, T,
        DTYPE: tl.constexpr, DESCRIBED: tl.constexpr, EXACT: tl.constexpr, MOST: tl.constexpr,
        WORDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_row, i_tile = _row_of(p_starts, n_rows, MOST)
        p_row = p_rows + i_row * WORDS
        D, P = tl.load(p_row + 3).to(tl.int32), tl.load(p_row + 4).to(tl.int32)
        s_yb, s_yt = tl.load(p_row + 5), tl.load(p_row + 6)
        s_ab, s_at = tl.load(p_row + 7), tl.load(p_row + 8)
        i_group = tl.load(p_row + 9)
        i_d, i_p = _tile_of(i_tile, tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P), GROUP)
        y = _open(p_row, s_yb, s_yt, B, T, D, DTYPE, DESCRIBED, BLOCK_T, BLOCK_D)
        a = _open(p_row + 1, s_ab, s_at, B, T, P, DTYPE, DESCRIBED, BLOCK_T, BLOCK_P)
        p_total = tl.load(p_row + 2).to(tl.pointer_type(tl.float32))
        _weighted_tile(
            y, a, p_total, p_order + i_group * B, p_ratio + i_group * B, p_first + i_group,
            p_last + i_group, i_d * BLOCK_D, i_p * BLOCK_P, B, T, D, P, s_yb, s_yt, s_ab, s_at,
            DESCRIBED, EXACT, BLOCK_D, BLOCK_P, BLOCK_T,
        )  # fmt: skip
