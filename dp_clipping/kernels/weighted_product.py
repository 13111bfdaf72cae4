"""Computes the clipped sum of a linear layer from its factors; stores no sample's gradient.

    Σ_i c_i Σ_t y_it a_itᵀ  [d, p] in float32, over the samples with c_i > 0

One matrix product over all tokens of all samples would do if the coefficients were 1. Scaling y in
16 bit would round it, by more than what is left of tokens that cancel; a second accumulator for
each sample's own product does not fit beside the first. So the one accumulator holds the sum in
units of the current sample's coefficient:

    S ← (S + Σ_t y_it a_itᵀ) · (c_i / c_{i+1}),   of the last sample c_i / 1

Samples come in ascending order of c, so the ratio is at most 1 and nothing overflows. Those with
c = 0 come first and are not read at all: what they hold may not be finite.

One loop runs over the blocks of tokens of all samples, so that loads run ahead over the end of a
sample: waiting at each would take as long as the products of some hundred tokens. Where the tiles
of a launch leave processors idle, a tile is the sum of several such loops, each over a share of the
samples.

Traffic: y and a about once, d·p float32 values written. Operations: those of the weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dp_clipping.kernels.coefficients import SortedCoefficients
from dp_clipping.kernels.launch.grouped_launch import (
    MOST_ROWS,
    ONE,
    WORDS,
    Operands,
    Pair,
    describe,
    launches,
    operands_of,
    table,
)
from dp_clipping.kernels.launch.tiles import Tile, ceil_div, launch, tl, triton
from dp_clipping.kernels.launch.tuning import best_for_pairs

if triton is not None:
    from dp_clipping.kernels.launch.grouped_launch import _open
    from dp_clipping.kernels.launch.tiles import _load_tile, _row_of, _tile_of

GROUP = 8
LARGE = 2e11  # operations of a layer with a launch of its own; others fill the device together
PROCESSORS = 132  # of an H100
MOST_PROGRAMS = 4 * PROCESSORS  # of a launch that divides samples
WRITING = 0.1  # time of a tile that is written and read again, in that of a block of 64 tokens
LEAST = 8  # samples of a share: there are far fewer sums of shares than gradients of samples
ALIGNED = 16  # values: rows of results that start at multiples of it are written in 16 bytes
SHALLOW = Tile(128, 256, 32, 8, 6, 1.2)
MOST_SHALLOW = 384  # tokens; deeper blocks need fewer steps
# Bytes of an element -> tiles. The speeds are those of an H200 on a few hundred tokens.
TILES = {
    2: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4, 0.92), Tile(64, 128, 64, 4, 4, 0.75),
        Tile(64, 64, 64, 4, 4, 0.65), Tile(128, 128, 64, 4, 3, 0.8), Tile(128, 256, 64, 8, 4)),
    4: (Tile(64, 64, 32, 4, 3), Tile(128, 64, 16, 8, 3, 0.9), Tile(32, 64, 32, 4, 3, 0.9)),
}  # fmt: skip


def weighted_products(
    pairs: Sequence[Pair],
    weights: SortedCoefficients,
    groups: Sequence[int],
    tile: Tile | None = None,
) -> list[Tensor]:
    """Returns Σ_i c_i y_iᵀ a_i of each pair: [d, p] float32; [n, d, p] of one with n places.

    Args:
        pairs: y [B, T, d] and a [B, T, p], float32, bfloat16 or float16, any strides. Few launches
            serve those that are alike.
        groups: which of the K clipping groups each pair belongs to.
    """
    found: list = [None] * len(pairs)
    for numbers, _ in launches(pairs, LARGE, {} if tile else TILES, longest_first=True):
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
    batch_size, tokens = y.shape[0], tuple(operands.tokens)
    if not (batch_size and any(tokens) and any(map(all, shapes))):
        return [y.new_zeros(shape, dtype=torch.float32) for shape in operands.results]
    name, tiles = _candidates(tokens, y.element_size())
    tile = tile or best_for_pairs(
        name, operands, tiles,
        lambda tile: _launch(operands, weights, groups, tile),
    )  # fmt: skip
    counts, share, splits, aligned = _division(tuple(shapes), batch_size, tokens, tile)
    of_shares = () if splits == 1 else (splits,)
    parts = [y.new_empty(*of_shares, *shape, dtype=torch.float32) for shape in operands.results]
    shared = dict(
        EXACT=y.element_size() == 4, GROUP=GROUP, BLOCK_D=tile.rows, BLOCK_P=tile.columns,
        BLOCK_T=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    ordered = weights.order, weights.values, weights.first
    if len(pairs) == 1 and operands.places[0] is ONE and described:
        _, a = pairs[0]
        _weighted_product_kernel[(counts[0], splits)](
            describe(y, (tile.depth, tile.rows)), describe(a, (tile.depth, tile.columns)),
            parts[0], *ordered, groups[0], batch_size, tokens[0], share, y.shape[2], a.shape[2],
            **shared,
        )  # fmt: skip
    else:
        rows = table(operands, parts, counts, groups)
        launch(
            _weighted_products_kernel, (rows.programs, splits), (rows.words, rows.starts, *ordered),
            (len(pairs), batch_size, share), DTYPE=y.dtype, DESCRIBED=described,
            ALIGNED=aligned, MOST=MOST_ROWS, WORDS=WORDS, **shared,
        )  # fmt: skip
    return parts if splits == 1 else [one.sum(0) for one in parts]


@lru_cache(maxsize=1024)
def _candidates(tokens: tuple[int, ...], size: int) -> tuple[str, dict[int, tuple[Tile, ...]]]:
    """Returns a name for products of T tokens each, and their tiles.

    Where T fills an odd number of shallow blocks, half of a deep one would be padding.

    Args:
        size: bytes of an element.
    """
    is_odd = all(ceil_div(T, SHALLOW.depth) % 2 == 1 for T in tokens)
    if size != 2 or max(tokens) > MOST_SHALLOW or not is_odd:
        return "weighted_product", TILES
    return "weighted_product in shallow blocks", TILES | {2: (SHALLOW, *TILES[2])}


@lru_cache(maxsize=1024)
def _division(
    shapes: tuple[tuple[int, int, int], ...], batch_size: int, tokens: tuple[int, ...], tile: Tile
) -> tuple[list[int], int, int, int]:
    """Returns the tiles of each result, the samples of a share, the shares, and `ALIGNED`.

    The last one is 1 where results do not start at multiples of it.
    """
    counts = [n * ceil_div(d, tile.rows) * ceil_div(p, tile.columns) for n, d, p in shapes]
    blocks = [ceil_div(T, 64) for T in tokens]
    share = _share(counts, blocks, batch_size)
    aligned = all(p % ALIGNED == 0 for _, _, p in shapes)
    return counts, share, ceil_div(batch_size, share), ALIGNED if aligned else 1


def _share(counts: Sequence[int], blocks: Sequence[int], batch_size: int) -> int:
    """Returns how many samples a program sums: that with the least predicted time.

    In turns of all processors, each as long as a share, and the writing of sums of shares.

    Args:
        counts, blocks: tiles of each product, and blocks of tokens that each of them reads.
    """
    programs = sum(counts)
    mean = sum(n * each for n, each in zip(counts, blocks, strict=True)) / max(1, programs)

    def time(splits: int) -> float:
        turns = ceil_div(programs * splits, PROCESSORS)
        written = programs * splits if splits > 1 else 0
        longest = max(turns * mean, *blocks)
        return longest * ceil_div(batch_size, splits) + WRITING * written

    most = min(batch_size // LEAST, MOST_PROGRAMS // max(1, programs))
    return ceil_div(batch_size, min(range(1, max(1, most) + 1), key=time))


def weighted_product_plain(y: Tensor, a: Tensor, coefficients: Tensor) -> Tensor:
    """Reference implementation of `weighted_product`, in float64, rounded once."""
    good = coefficients > 0
    y, a = y[good].double(), a[good].double()
    return torch.einsum("btd,btp,b->dp", y, a, coefficients[good].double()).float()


if triton is not None:

    @triton.jit
    def _weighted_tile(
        y, a, p_total, p_order, p_c, p_first, i_share, share, o_d, o_p, B, T, D, P,
        s_yb, s_yt, s_ab, s_at, DESCRIBED: tl.constexpr, EXACT: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        """Stores a tile of the sum over a share of samples, from (o_d, o_p) on."""
        b_total = tl.zeros((BLOCK_D, BLOCK_P), tl.float32)
        i_first = tl.maximum(tl.load(p_first), i_share * share)
        i_stop = tl.minimum(i_share * share + share, B)
        i_b = tl.load(p_order + i_first, mask=i_first < i_stop, other=0)
        i, o_t = i_first, 0
        for _ in range(0, (i_stop - i_first) * tl.cdiv(T, BLOCK_T)):
            b_y = _load_tile(y, i_b, o_t, o_d, T, D, s_yb, s_yt, DESCRIBED, BLOCK_T, BLOCK_D)
            b_a = _load_tile(a, i_b, o_t, o_p, T, P, s_ab, s_at, DESCRIBED, BLOCK_T, BLOCK_P)
            o_t += BLOCK_T
            is_end = o_t >= T
            i += is_end.to(tl.int32)
            o_t = tl.where(is_end, 0, o_t)
            # Of the next step: tiles whose place is read in their own step are not loaded ahead.
            i_b = tl.load(p_order + min(i, B - 1))
            if EXACT:
                b_total = tl.dot(b_y.T, b_a, b_total, input_precision="ieee")
            else:
                b_total = tl.dot(b_y.T, b_a, b_total)
            # Behind the product, which else would wait for the one before it.
            if is_end:
                following = tl.load(p_c + i, mask=i < i_stop, other=1.0)
                b_total *= tl.div_rn(tl.load(p_c + i - 1), following)
        o_rows, o_columns = o_d + tl.arange(0, BLOCK_D), o_p + tl.arange(0, BLOCK_P)
        p_total += o_rows[:, None].to(tl.int64) * P + o_columns[None, :]
        tl.store(p_total, b_total, mask=(o_rows[:, None] < D) & (o_columns[None, :] < P))

    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["i_group", "B", "T", "share"])
    def _weighted_product_kernel(
        y, a, p_total, p_order, p_c, p_first, i_group, B, T, share, D, P,
        EXACT: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_d, i_p = _tile_of(tl.program_id(0), tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P), GROUP)
        _weighted_tile(
            y, a, p_total + tl.cast(tl.program_id(1), tl.int64) * D * P, p_order + i_group * B,
            p_c + i_group * B, p_first + i_group, tl.program_id(1), share, i_d * BLOCK_D,
            i_p * BLOCK_P, B, T, D, P, 0, 0, 0, 0, True, EXACT, BLOCK_D, BLOCK_P, BLOCK_T,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["n_rows", "B", "share"])
    def _weighted_products_kernel(
        p_rows, p_starts, p_order, p_c, p_first, n_rows, B, share,
        DTYPE: tl.constexpr, DESCRIBED: tl.constexpr, ALIGNED: tl.constexpr, EXACT: tl.constexpr,
        MOST: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_row, i_tile = _row_of(p_starts, n_rows, MOST)
        p_row = p_rows + i_row * WORDS
        D = tl.load(p_row + 3).to(tl.int32)
        P = tl.multiple_of(tl.load(p_row + 4).to(tl.int32), ALIGNED)
        s_yb, s_yt = tl.load(p_row + 5), tl.load(p_row + 6)
        s_ab, s_at = tl.load(p_row + 7), tl.load(p_row + 8)
        i_group, T = tl.load(p_row + 9), tl.load(p_row + 10).to(tl.int32)
        n_products, n_tiles = tl.load(p_row + 11), tl.cdiv(D, BLOCK_D) * tl.cdiv(P, BLOCK_P)
        i_product = i_tile // n_tiles
        place = tl.load(p_rows + tl.load(p_row + 12) + i_product)
        i_d, i_p = _tile_of(
            i_tile % n_tiles, tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P), GROUP
        )  # fmt: skip
        y = _open(p_row, 0, s_yb, s_yt, B, T, D, DTYPE, DESCRIBED, BLOCK_T, BLOCK_D)
        a = _open(p_row + 1, place, s_ab, s_at, B, T, P, DTYPE, DESCRIBED, BLOCK_T, BLOCK_P)
        p_total = tl.load(p_row + 2).to(tl.pointer_type(tl.float32))
        p_total += (tl.program_id(1) * n_products + i_product) * D * P
        p_total = tl.multiple_of(p_total, ALIGNED)
        _weighted_tile(
            y, a, p_total, p_order + i_group * B, p_c + i_group * B, p_first + i_group,
            tl.program_id(1), share, i_d * BLOCK_D, i_p * BLOCK_P, B, T, D, P, s_yb, s_yt, s_ab,
            s_at, DESCRIBED, EXACT, BLOCK_D, BLOCK_P, BLOCK_T,
        )  # fmt: skip
