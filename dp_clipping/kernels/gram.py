"""Computes norms of linear layers from token-by-token Gram matrices, kept in registers.

    ‖G_i‖² = Σ_{t,s} (a_it · a_is)(y_it · y_is)

A program takes two blocks of one sample's tokens, or one block and itself, forms the two Gram tiles
and adds up their product; both matrices are symmetric, so blocks below the diagonal are left out
and those above count twice. Layers that read the same input share its tile: with a common a,
Σ_l ‖G_il‖² is the same expression with Σ_l y_l,it · y_l,is. One launch serves many layers, the
programs of which find theirs in a table: a single layer's would leave a part of the device idle at
its end.

A matrix unit's sums are cut off, not rounded, so that long chains of products drift. After
CHUNK features the accumulator starts again from zero. A piece of the input's tile is added to that
tile, and a piece of an output gradient's is multiplied by it at once: a second tile of sums would
not leave the accumulator its registers, and each product would wait for the one before it.

Traffic: y and a are read T / BLOCK times, mostly from the second-level cache; two numbers a program
are written. Operations: B·T·(T + BLOCK)·(p + d), a little over half of the full matrices'.
(Goodfellow 2015 for the expression at T = 1, Li et al. 2022, arXiv:2110.05679, for sequences.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_clipping.clipping.norms import GRAM_PIECE, LOST
from dp_clipping.kernels.launch.grouped_launch import allocate
from dp_clipping.kernels.launch.tiles import (
    Tile,
    ceil_div,
    is_aligned,
    kept_on_device,
    kept_table_on,
    launch,
    tl,
    triton,
)
from dp_clipping.kernels.launch.tuning import best, name_of

if triton is not None:
    from dp_clipping.kernels.launch.grouped_launch import _open
    from dp_clipping.kernels.launch.tiles import _load_tile, _token_norms

CHUNK = GRAM_PIECE  # features that are summed in one chain
TILES = {
    2: (Tile(128, 128, 128, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 64, 128, 4, 3)),
    4: (Tile(64, 64, 32, 4, 2), Tile(32, 32, 32, 4, 2)),
}  # rows = columns: tokens of a block; depth: features  # fmt: skip
MOST_SHORT = 64  # tokens, of which most of a larger tile would be padding
SHORT_TILES = {2: TILES[2][::-1], 4: TILES[4]}
OPERAND_WORDS = 4  # address, features, stride of samples, stride of tokens
MOST_SHARED = 3  # layers that one row of the table serves

LinearShape = tuple[Tensor, Sequence[Tensor]]


def gram_squares(uses: Sequence[LinearShape], tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Returns squared norms [L, B] and their scales S = Σ_t ‖a_t‖‖y_t‖ [L, B], float32.

    S has in it what underflow may have taken from the squared norms: see norms.py.

    Args:
        uses: for each of L results an input a [B, T, p] and up to MOST_SHARED output gradients
            [B, T, d_l], whose squared norms are added up; all of one dtype, B and T, any strides.
    """
    a = uses[0][0]
    batch_size, tokens = a.shape[:2]
    if not (batch_size and tokens):
        zero = a.new_zeros(len(uses), batch_size, dtype=torch.float32)
        return zero, zero.clone()
    copies: list[Tensor] = []  # of what the kernel cannot read: they live as long as the launch
    addresses: list[int] = []
    strides: list[int] = []
    operands = 1 + max([len(ys) for _, ys in uses])
    words: list[int] = []  # rows of so many; those without features are none
    features, is_full = 0, True
    for given, ys in uses:
        for x in (given, *ys):
            sample, token, last = x.stride()
            if last != 1 and x.numel():
                x = x.contiguous()
                copies.append(x)
                sample, token, _ = x.stride()
            address, width = x.data_ptr(), x.shape[2]
            is_full, features = is_full and bool(width), features + width
            addresses.append(address)
            strides += sample, token
            words += address, width, sample, token
        words += [0] * (OPERAND_WORDS * (operands - 1 - len(ys)))
    described = is_full and is_aligned(addresses, strides, a.element_size())
    if tile is None:
        tiles = SHORT_TILES if tokens <= MOST_SHORT else TILES
        tile = best(
            name_of("gram", described), a.dtype, (len(uses), batch_size, tokens, features),
            tiles[a.element_size()], lambda tile: gram_squares(uses, tile), a.device,
        )  # fmt: skip
    pairs = _pairs(ceil_div(tokens, tile.rows), a.device)
    shape = (2, len(uses), batch_size, len(pairs))
    partial = torch.empty(shape, dtype=torch.float32, device=a.device)
    if described:
        triton.set_allocator(allocate)
    rows = kept_table_on(a.device, tuple(words))
    launch(
        _gram_kernel, (len(uses) * batch_size * len(pairs),), (rows, pairs, partial),
        (batch_size, tokens, len(pairs), partial[0].numel()), DTYPE=a.dtype,
        DESCRIBED=described, EXACT=a.element_size() == 4, SEVERAL=len(pairs) > 1,
        OPERANDS=operands, WORDS=OPERAND_WORDS, BLOCK=tile.rows, BLOCK_X=tile.depth, CHUNK=CHUNK,
        LOST=LOST,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    squares, scale = partial.sum(3).unbind(0)
    return squares, scale


def gram_squares_plain(uses: Sequence[LinearShape]) -> tuple[Tensor, Tensor]:
    """Reference implementation of `gram_squares`, in float64, rounded once."""
    squares, scales = [], []
    for a, ys in uses:
        a, y = a.double(), torch.cat([y.double() for y in ys], dim=2)
        gram_a, gram_y = torch.bmm(a, a.mT), torch.bmm(y, y.mT)
        squares.append((gram_a * gram_y).sum((1, 2)))
        tokens = [x.norm(dim=2) + x.shape[2] ** 0.5 * LOST for x in (a, y)]
        scales.append((tokens[0] * tokens[1]).sum(1))
    return torch.stack(squares).float(), torch.stack(scales).float()


@kept_on_device(maxsize=64)
def _pairs(blocks: int, device: torch.device) -> Tensor:
    """Returns blocks (i, j) with i ≤ j of a symmetric matrix: [pairs, 2] int32."""
    return torch.triu_indices(blocks, blocks, device=device).t().int().contiguous()


if triton is not None:
    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["B", "T", "n_pairs", "n_results"])
    def _gram_kernel(
        p_rows, p_pairs, p_partial, B, T, n_pairs, n_results,
        DTYPE: tl.constexpr, DESCRIBED: tl.constexpr, EXACT: tl.constexpr, SEVERAL: tl.constexpr,
        OPERANDS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
        CHUNK: tl.constexpr, LOST: tl.constexpr,
    ):  # fmt: skip
        i_pair, i_rest = tl.program_id(0) % n_pairs, tl.program_id(0) // n_pairs
        i_b, i_row = i_rest % B, i_rest // B
        p_row = p_rows + i_row * OPERANDS * WORDS
        o_i = tl.load(p_pairs + 2 * i_pair) * BLOCK
        o_j = tl.load(p_pairs + 2 * i_pair + 1) * BLOCK
        p_own = p_partial + tl.program_id(0)
        if o_i == o_j:
            total, scale = _blocks(
                p_row, i_b, o_i, o_i, B, T, DTYPE, DESCRIBED, EXACT, True, OPERANDS, WORDS,
                BLOCK, BLOCK_X, CHUNK, LOST,
            )  # fmt: skip
            tl.store(p_own, total)
            tl.store(p_own + n_results, scale)
        elif SEVERAL:
            total, scale = _blocks(
                p_row, i_b, o_i, o_j, B, T, DTYPE, DESCRIBED, EXACT, False, OPERANDS, WORDS,
                BLOCK, BLOCK_X, CHUNK, LOST,
            )  # fmt: skip
            tl.store(p_own, 2 * total)
            tl.store(p_own + n_results, scale)

    @triton.jit
    def _blocks(
        p_row, i_b, o_i, o_j, B, T, DTYPE: tl.constexpr, DESCRIBED: tl.constexpr,
        EXACT: tl.constexpr, OWN: tl.constexpr, OPERANDS: tl.constexpr, WORDS: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, CHUNK: tl.constexpr, LOST: tl.constexpr,
    ):  # fmt: skip
        """Returns the sum over tokens from o_i and from o_j on, and that of scales if `OWN`."""
        b_a = tl.zeros((BLOCK, BLOCK), tl.float32)
        b_sums, b_squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        b_a, b_sums, b_squares = _add_operand(
            b_a, b_sums, b_squares, p_row, i_b, o_i, o_j, B, T, True, DTYPE, DESCRIBED, EXACT, OWN,
            BLOCK, BLOCK_X, CHUNK,
        )  # fmt: skip
        outputs = tl.load(p_row + WORDS + 1)
        b_a, b_sums, b_squares = _add_operand(
            b_a, b_sums, b_squares, p_row + WORDS, i_b, o_i, o_j, B, T, False, DTYPE, DESCRIBED,
            EXACT, OWN, BLOCK, BLOCK_X, CHUNK,
        )  # fmt: skip
        for i in range(2, OPERANDS):
            features = tl.load(p_row + i * WORDS + 1)
            if features > 0:  # a descriptor takes its time
                outputs += features
                b_a, b_sums, b_squares = _add_operand(
                    b_a, b_sums, b_squares, p_row + i * WORDS, i_b, o_i, o_j, B, T, False, DTYPE,
                    DESCRIBED, EXACT, OWN, BLOCK, BLOCK_X, CHUNK,
                )  # fmt: skip
        scale = 0.0
        if OWN:
            o_t = tl.arange(0, BLOCK)
            b_own = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_a, 0.0), axis=1)
            b_norms = _token_norms(b_own, tl.load(p_row + 1), LOST)
            b_norms *= _token_norms(b_squares, outputs, LOST)
            scale = tl.sum(tl.where(o_i + o_t < T, b_norms, 0.0))
        return tl.sum(b_sums), scale

    @triton.jit
    def _add_operand(
        b_a, b_sums, b_squares, p_operand, i_b, o_i, o_j, B, T, IS_A: tl.constexpr,
        DTYPE: tl.constexpr, DESCRIBED: tl.constexpr, EXACT: tl.constexpr, OWN: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, CHUNK: tl.constexpr,
    ):  # fmt: skip
        """Adds an input's Gram tile to b_a, or b_a times an output gradient's to b_sums."""
        X = tl.load(p_operand + 1).to(tl.int32)
        s_b, s_t = tl.load(p_operand + 2), tl.load(p_operand + 3)
        x = _open(p_operand, 0, s_b, s_t, B, T, X, DTYPE, DESCRIBED, BLOCK, BLOCK_X)
        o_t = tl.arange(0, BLOCK)
        m_own = o_t[:, None] == o_t[None, :]
        b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        for o_x in range(0, X, BLOCK_X):
            b_i = _load_tile(x, i_b, o_i, o_x, T, X, s_b, s_t, DESCRIBED, BLOCK, BLOCK_X)
            b_j = b_i
            if not OWN:
                b_j = _load_tile(x, i_b, o_j, o_x, T, X, s_b, s_t, DESCRIBED, BLOCK, BLOCK_X)
            if EXACT:
                b_part = tl.dot(b_i, b_j.T, b_part, input_precision="ieee")
            else:
                b_part = tl.dot(b_i, b_j.T, b_part)
            if ((o_x + BLOCK_X) % CHUNK == 0) | (o_x + BLOCK_X >= X):
                if IS_A:
                    b_a += b_part
                else:
                    b_sums += tl.sum(b_a * b_part, axis=1)
                    if OWN:
                        b_squares += tl.sum(tl.where(m_own, b_part, 0.0), axis=1)
                b_part = tl.zeros((BLOCK, BLOCK), tl.float32)
        return b_a, b_sums, b_squares
