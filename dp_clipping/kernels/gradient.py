"""A linear layer's per-sample gradients and the norms of exactly the rounded values, in one pass.

    G_i = Σ_t y_it a_itᵀ  [d, p],  stored in 16 bit;  n_i² = Σ (stored values)²

Each program accumulates a tile of one sample's G in float32 registers, rounds it, squares what it
rounded and adds up the squares; then the same tile of the next sample's. A norm taken afterwards
would read all of G again, and a norm of the unrounded values could be below that of what is summed
later.

Traffic: y and a are read about once from memory (tiles meet in the second-level cache), B·d·p
values are written. Operations: 2·B·T·d·p, those of the ordinary weight gradient.

Without storing, the same loop accumulates the norm over tokens with nothing materialised.

The squares of tiles (`TileSquares`) of a whole step are added up by one launch, in float64: a
norm's last bit must not tell what shared a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import stored_dtype
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
from dp_clipping.kernels.launch.tiles import (
    ALIGNMENT,
    Tile,
    ceil_div,
    kept_table_on,
    launch,
    tl,
    triton,
)
from dp_clipping.kernels.launch.tuning import best_for_pairs

if triton is not None:
    from dp_clipping.kernels.launch.grouped_launch import _open
    from dp_clipping.kernels.launch.tiles import _load_tile, _row_of, _tile_of

GROUP = 8
LARGE = 1e11  # operations: 0.15 ms on an H200; a launch takes its host 0.1 ms
PROGRAMS = 528  # four for each processor of an H200
SQUARES = 512  # of tiles that are loaded at a time
TILE_WORDS = 7  # of a row: parts, most, tiles, groups, scale, samples, where results are
# Bytes of an element -> tiles. The speeds are those of an H200 on a few hundred tokens.
TILES = {
    2: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4, 0.92), Tile(64, 128, 64, 4, 4, 0.75),
        Tile(64, 64, 64, 4, 4, 0.65), Tile(128, 128, 64, 4, 3, 0.8), Tile(256, 128, 64, 8, 3),
        Tile(128, 256, 64, 8, 4)),
    4: (Tile(64, 64, 32, 4, 3), Tile(128, 64, 16, 8, 3, 0.9), Tile(32, 64, 32, 4, 3, 0.9)),
}  # fmt: skip
# Of small G from few tokens in 16 bit, as of the last convolutions of small networks.
SHALLOW, LOW = 32, 64  # most tokens, and most rows of G
SHALLOW_TILES = {
    2: (Tile(64, 128, 32, 4, 4), Tile(32, 128, 16, 2, 4, 0.78), Tile(16, 128, 32, 4, 4, 0.45)),
}  # fmt: skip
# The same where G is not stored.
NORM_TILES = TILES | {2: (TILES[2][0], Tile(128, 128, 64, 4, 3, 1.1), *TILES[2][1:4])}


TileSquares = tuple[Tensor, int, int]
"""The squares of one parameter's tiles: sums [parameters, rows, most] float32 of all parameters
that shared a launch, the number of this one, and how many tiles it has. A row is a sample, or one
of its groups of channels."""


def gradients_and_squares(
    pairs: Sequence[Pair], tile: Tile | None = None, store: bool | Sequence[Tensor] = True
) -> tuple[Sequence[Tensor | None], list[TileSquares]]:
    """Returns each G [B, d, p] in `stored_dtype` (None unless `store`), and its tiles' squares.

    Args:
        pairs: output gradients y [B, T, d] and inputs a [B, T, p] of linear layers of one B, in
            float32, bfloat16 or float16, any strides. Few launches serve those of one dtype. Of a
            pair with places G is [B, n, d, p], and the norm is that of all n.
        store: whether G is stored; or where that of each pair is, contiguous.
    """
    found: list[Tensor | None] = [None] * len(pairs)
    squares: list[TileSquares] = list(found)  # type: ignore[arg-type]
    for numbers, is_large in launches(pairs, LARGE, {} if tile else TILES if store else NORM_TILES):
        if len(numbers) == len(pairs):
            return _launch(operands_of(pairs), tile, store, is_large)
        own = [pairs[n] for n in numbers]
        at = store if isinstance(store, bool) else [store[n] for n in numbers]
        gradients, tiles = _launch(operands_of(own), tile, at, is_large)
        for number, one, its in zip(numbers, gradients, tiles, strict=True):
            found[number], squares[number] = one, its
    return found, squares


def gradient_and_squares(
    y: Tensor, a: Tensor, tile: Tile | None = None, store: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Calls `gradients_and_squares` for one layer; returns G and squared norms [B] float32."""
    (gradients,), squares = gradients_and_squares([(y, a)], tile, store)
    return gradients, squares_of_tiles([squares], [1], [None], len(y))[0]


def _launch(
    operands: Operands, tile: Tile | None, store: bool | Sequence[Tensor], is_large: bool
) -> tuple[Sequence[Tensor | None], list[TileSquares]]:
    pairs, shapes, described = operands.pairs, operands.shapes, operands.described
    given, store = (None, store) if isinstance(store, bool) else (store, True)
    y, _ = pairs[0]
    batch_size, tokens = y.shape[0], operands.tokens
    dtype = stored_dtype(y.dtype)
    if not (batch_size and any(tokens) and any(map(all, shapes))):
        nothing = y.new_zeros(1, batch_size, 1, dtype=torch.float32)
        for one in given or ():
            one.zero_()
        results = given or [
            y.new_zeros(batch_size, *shape, dtype=dtype) if store else None
            for shape in operands.results
        ]  # fmt: skip
        return results, [(nothing, 0, 1)] * len(pairs)
    name = "instantiate" if store else "accumulate alone" if is_large else "accumulate"
    tiles = TILES if store or is_large else NORM_TILES
    is_low = max(tokens) <= SHALLOW and max([rows for _, rows, _ in shapes]) <= LOW
    if is_low and y.element_size() == 2:
        name, tiles = f"{name} in shallow blocks", SHALLOW_TILES
    tile = tile or best_for_pairs(
        name, operands, tiles, lambda tile: _launch(operands, tile, given or store, is_large)
    )
    results = given or [
        y.new_empty(batch_size, *shape, dtype=dtype) if store else None
        for shape in operands.results
    ]  # fmt: skip
    counts, programs, share, aligned = _division(
        tuple(shapes), batch_size, tile.rows, tile.columns, dtype.itemsize
    )
    most = max(counts)
    squares = y.new_empty(len(pairs), batch_size, most, dtype=torch.float32)
    shared = dict(
        STORE=store, EXACT=y.element_size() == 4, GROUP=GROUP, BLOCK_D=tile.rows,
        BLOCK_P=tile.columns, BLOCK_T=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    written = store and described and aligned
    # In a loop over samples the tile that is being stored has memory of its own.
    written_in_loop = written and dtype.itemsize <= y.element_size()
    if len(pairs) == 1 and operands.places[0] is ONE and described and written == store:
        (_, a), (gradients,) = pairs[0], results
        target = describe(gradients, (tile.rows, tile.columns)) if store else None
        _gradient_kernel[(counts[0] * batch_size,)](
            describe(y, (tile.depth, tile.rows)), describe(a, (tile.depth, tile.columns)), target,
            squares, batch_size, tokens[0], y.shape[2], a.shape[2], **shared,
        )  # fmt: skip
    else:
        layers = table(operands, results, programs, [0] * len(pairs))
        launch(
            _gradients_kernel, (layers.programs,), (layers.words, layers.starts, squares),
            (len(pairs), batch_size, most, share),
            DTYPE=y.dtype, STORED=dtype, DESCRIBED=described,
            WRITTEN=written_in_loop, MOST=MOST_ROWS, WORDS=WORDS, **shared,
        )  # fmt: skip
    return results, list(zip([squares] * len(pairs), range(len(pairs)), counts, strict=True))


def squares_of_tiles(
    tiles: Sequence[Sequence[TileSquares]], groups: Sequence[int],
    scales: Sequence[Tensor | None], batch_size: int,
) -> Tensor:  # fmt: skip
    """Returns squared norms [L, B] float32 of L parameters, in one launch.

    Args:
        tiles: of each parameter, in the order of the samples.
        groups: rows of a sample, of each.
        scales: [B] float32, by which G is to be multiplied, of each; None: by nothing.
    """
    words: list[int] = []
    end = 0
    for several, of_sample, scale in zip(tiles, groups, scales, strict=True):
        first, at = end, 0 if scale is None else scale.data_ptr()
        for parts, number, count in several:
            _, rows, most = parts.shape
            own, samples = parts.data_ptr() + 4 * number * rows * most, rows // of_sample
            words += own, most, count, of_sample, at, samples, end
            end += samples
            at += 4 * samples if at else 0
        assert end == first + batch_size
    found = tiles[0][0][0].new_empty(len(tiles), batch_size)
    if batch_size:
        launch(
            _tiles_kernel, (batch_size, len(words) // TILE_WORDS),
            (kept_table_on(found.device, tuple(words)), found), WORDS=TILE_WORDS, BLOCK=SQUARES,
            num_warps=4,
        )  # fmt: skip
    return found


@lru_cache(maxsize=1024)
def _division(
    shapes: tuple[tuple[int, int, int], ...], batch_size: int, rows: int, columns: int,
    itemsize: int,
) -> tuple[list[int], list[int], int, bool]:  # fmt: skip
    """Returns tiles and programs of each G [n, d, p], samples of a program, and `aligned`.

    Where there are few tiles, samples are divided among programs too. `aligned` is whether rows of
    all G, which start at a multiple of ALIGNMENT, do so as well.

    Args:
        rows, columns, itemsize: of a tile, and bytes of an element of G.
    """
    counts = [n * ceil_div(d, rows) * ceil_div(p, columns) for n, d, p in shapes]
    share = ceil_div(batch_size, min(batch_size, ceil_div(PROGRAMS, max(1, sum(counts)))))
    splits = ceil_div(batch_size, share)
    aligned = all(p * itemsize % ALIGNMENT == 0 for _, _, p in shapes)
    return counts, [count * splits for count in counts], share, aligned


def squares_of_tiles_plain(
    tiles: Sequence[TileSquares], groups: int = 1, scale: Tensor | None = None
) -> Tensor:
    """Reference implementation of `squares_of_tiles` for one parameter, [B]."""
    rows = [parts[number, :, :count].double().sum(1) for parts, number, count in tiles]
    found = torch.cat(rows).unflatten(0, (-1, groups)).sum(1)
    return (found if scale is None else found * scale.double().square()).float()


def gradient_and_squares_plain(
    y: Tensor, a: Tensor, store: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Returns the same by reference: in float64, rounded once, only if G is stored."""
    gradients = torch.bmm(y.double().mT, a.double())
    if store:
        gradients = gradients.to(stored_dtype(y.dtype))
    squares = gradients.double().square().sum((1, 2)).float()
    return (gradients if store else None), squares


if triton is not None:

    @triton.jit
    def _gradient_tile(
        y, a, g, p_square, i_b, o_d, o_p, T, D, P, s_yb, s_yt, s_ab, s_at, s_gb,
        STORED: tl.constexpr, DESCRIBED: tl.constexpr, STORE: tl.constexpr, WRITTEN: tl.constexpr,
        EXACT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        """Returns a tile of one sample's G from (o_d, o_p) on, and the sum of its squares."""
        b_g = tl.zeros((BLOCK_D, BLOCK_P), tl.float32)
        for o_t in range(0, T, BLOCK_T):
            b_y = _load_tile(y, i_b, o_t, o_d, T, D, s_yb, s_yt, DESCRIBED, BLOCK_T, BLOCK_D)
            b_a = _load_tile(a, i_b, o_t, o_p, T, P, s_ab, s_at, DESCRIBED, BLOCK_T, BLOCK_P)
            if EXACT:
                b_g = tl.dot(b_y.T, b_a, b_g, input_precision="ieee")
            else:
                b_g = tl.dot(b_y.T, b_a, b_g)
        if STORE:
            b_rounded = b_g.to(STORED)
            if WRITTEN:
                g.store([i_b, o_d, o_p], b_rounded.reshape(1, BLOCK_D, BLOCK_P))
            else:
                o_rows, o_columns = o_d + tl.arange(0, BLOCK_D), o_p + tl.arange(0, BLOCK_P)
                p_g = g + tl.cast(i_b, tl.int64) * s_gb
                p_g += o_rows[:, None].to(tl.int64) * P + o_columns[None, :]
                m_g = (o_rows[:, None] < D) & (o_columns[None, :] < P)
                tl.store(p_g, b_rounded, mask=m_g)
            b_g = b_rounded.to(tl.float32)
        tl.store(p_square, tl.sum(b_g * b_g))

    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["B", "T"])
    def _gradient_kernel(
        y, a, g, p_squares, B, T, D, P, STORE: tl.constexpr, EXACT: tl.constexpr,
        GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        n_d, n_p = tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P)
        i_b, i_tile = tl.program_id(0) // (n_d * n_p), tl.program_id(0) % (n_d * n_p)
        i_d, i_p = _tile_of(i_tile, n_d, n_p, GROUP)
        _gradient_tile(
            y, a, g, p_squares + tl.program_id(0), i_b, i_d * BLOCK_D, i_p * BLOCK_P, T, D, P,
            0, 0, 0, 0, 0, g.dtype if STORE else tl.float32, True, STORE, STORE, EXACT,
            BLOCK_D, BLOCK_P, BLOCK_T,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["n_rows", "B", "n_most", "share"])
    def _gradients_kernel(
        p_rows, p_starts, p_squares, n_rows, B, n_most, share,
        DTYPE: tl.constexpr, STORED: tl.constexpr, DESCRIBED: tl.constexpr, STORE: tl.constexpr,
        WRITTEN: tl.constexpr, EXACT: tl.constexpr, MOST: tl.constexpr, WORDS: tl.constexpr,
        GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        i_row, i_own = _row_of(p_starts, n_rows, MOST)
        p_row = p_rows + i_row * WORDS
        D, P = tl.load(p_row + 3).to(tl.int32), tl.load(p_row + 4).to(tl.int32)
        s_yb, s_yt = tl.load(p_row + 5), tl.load(p_row + 6)
        s_ab, s_at = tl.load(p_row + 7), tl.load(p_row + 8)
        T, n_products = tl.load(p_row + 10).to(tl.int32), tl.load(p_row + 11).to(tl.int32)
        n_d, n_p = tl.cdiv(D, BLOCK_D), tl.cdiv(P, BLOCK_P)
        n_tiles = n_d * n_p
        i_tile, i_share = i_own % (n_products * n_tiles), i_own // (n_products * n_tiles)
        i_product = i_tile // n_tiles
        place = tl.load(p_rows + tl.load(p_row + 12) + i_product)
        i_d, i_p = _tile_of(i_tile % n_tiles, n_d, n_p, GROUP)
        y = _open(p_row, 0, s_yb, s_yt, B, T, D, DTYPE, DESCRIBED, BLOCK_T, BLOCK_D)
        a = _open(p_row + 1, place, s_ab, s_at, B, T, P, DTYPE, DESCRIBED, BLOCK_T, BLOCK_P)
        s_g = tl.cast(P, tl.int64)
        s_gb, o_g = s_g * D * n_products, s_g * D * i_product
        g = y
        if STORE:
            g = _open(p_row + 2, o_g, s_gb, s_g, B, D, P, STORED, WRITTEN, BLOCK_D, BLOCK_P)
        for i_b in range(i_share * share, min(i_share * share + share, B)):
            p_square = p_squares + (tl.cast(i_row, tl.int64) * B + i_b) * n_most + i_tile
            _gradient_tile(
                y, a, g, p_square, i_b, i_d * BLOCK_D, i_p * BLOCK_P, T, D, P, s_yb, s_yt, s_ab,
                s_at, s_gb, STORED, DESCRIBED, STORE, WRITTEN, EXACT, BLOCK_D, BLOCK_P, BLOCK_T,
            )  # fmt: skip

    @triton.jit
    def _tiles_kernel(p_rows, p_found, WORDS: tl.constexpr, BLOCK: tl.constexpr):
        i_b, p_row = tl.program_id(0), p_rows + tl.program_id(1) * WORDS
        if i_b < tl.load(p_row + 5):
            n_most, n_tiles = tl.load(p_row + 1), tl.load(p_row + 2)
            n_own = n_most * tl.load(p_row + 3)
            p_parts = tl.load(p_row).to(tl.pointer_type(tl.float32)) + i_b * n_own
            square = tl.zeros((), tl.float64)
            for o_first in range(0, n_own, BLOCK):
                o_n = o_first + tl.arange(0, BLOCK)
                m_n = (o_n < n_own) & (o_n % n_most < n_tiles)
                square += tl.sum(tl.load(p_parts + o_n, mask=m_n, other=0).to(tl.float64))
            i_scale = tl.load(p_row + 4)
            if i_scale != 0:
                scale = tl.load(i_scale.to(tl.pointer_type(tl.float32)) + i_b).to(tl.float64)
                square *= scale * scale
            tl.store(p_found + tl.load(p_row + 6) + i_b, square.to(tl.float32))
