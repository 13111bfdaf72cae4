"""Adds up a sample's rows of equal tokens in embeddings and takes norms, in one pass.

    s_iv = Σ_{t: id_it = v} y_it  [d],   ‖G_i‖² = Σ_v ‖s_iv‖²,   total_v = Σ_i c_i s_iv  [d]

One stable sort by token and sample puts the rows of each s_iv next to each other (a run) and the
runs of a token behind one another. How many runs there are, only the device knows: there are as
many programs as tokens, and those without a run end at once. Each adds up one run, or one token's
runs, always in the same order and without atomics, so that results do not vary.

A network for tables has dozens of embeddings with few tokens each. So the tokens of many uses are
sorted together, those of a use behind one another, and a launch serves them all. What is found of a
use does not depend on the others.

A run of a sample with c = 0 is left out by not loading it: what it holds may not be finite.

Traffic: y read once, at most B·T·d float32 values written, and read once for the total, V·d float32
values of which are written. Sorting B·T numbers is little beside them unless d is very small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import (
    ALIGNMENT,
    ceil_div,
    kept_table_on,
    launch,
    next_power_of_two,
    readable,
    tl,
    triton,
)
from dp_clipping.torch_compat import set_to_zero

if triton is not None:
    from dp_clipping.kernels.launch.tiles import _row_of

BLOCK = 256  # features of a program: most runs are one row, which one warp loads at once
ROWS = 8  # whose loads are in flight together
MOST_ROWS = 64  # of the samples that have a token, of few features
WARPS = 1
NUMBERED = 1024  # tokens of a program that makes their keys
MOST = 128  # uses of a launch


class Tokens(NamedTuple):
    """The tokens of one use of an embedding, and their output gradients.

    Attributes:
        ids: [M, T] int64, any strides.
        y: [M, T, d], float32, bfloat16 or float16, any strides; zero at padding tokens.
        vocabulary: V, the rows of the embedding.
        samples: [M] int64, contiguous: of which sample each of the M is, in ascending order; None:
            M is B, and each is of its own.
    """

    ids: Tensor
    y: Tensor
    vocabulary: int
    samples: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenSums:
    """The sums s_iv of uses that shared a launch; R runs of N tokens, all on the device.

    Attributes:
        shapes: (V, d) of each use; as many blocks of features have all d.
        batch_size, vocabulary: B, and the largest V.
        squares: [uses, B] float32, ‖G_i‖² of the sums as they are stored.
        sums: [N, largest d] float32, run by run; behind a run's d values, and behind the R-th row,
            is what was never written.
        keys: [N] int64, (use · vocabulary + token) · B + sample of the sorted tokens.
        starts: [N + 1] int64, where each run starts in `keys`, and N behind the last.
    """

    shapes: list[tuple[int, int]]
    batch_size: int
    vocabulary: int
    squares: Tensor
    sums: Tensor
    keys: Tensor
    starts: Tensor

    def weighted_sums(
        self, numbers: Sequence[int], coefficients: Tensor, groups: Sequence[int]
    ) -> list[Tensor]:
        """Returns Σ_i c_i G_i [V, d] float32 of some uses, over the samples with c_i > 0.

        Args:
            numbers: which of the uses.
            coefficients: c [K, B] float32.
            groups: which row of these each of them has.
        """
        totals = []
        words = [0] * (3 * len(self.shapes))  # a use without a total is left out
        for number, group in zip(numbers, groups, strict=True):
            total = self.sums.new_empty(self.shapes[number])
            words[3 * number : 3 * number + 3] = total.data_ptr(), total.shape[1], group
            totals.append(total)
        set_to_zero(totals)
        if not self.sums.numel():
            return totals
        tokens, width = self.sums.shape
        block, blocks = _blocks(width)
        table = kept_table_on(self.sums.device, tuple(words))
        launch(
            _weighted_tokens_kernel, (tokens * blocks,),
            (table, self.sums, self.keys, self.starts, coefficients.contiguous()),
            (tokens, self.batch_size, self.vocabulary, width),
            ROWS=min(MOST_ROWS, ROWS * BLOCK // block), BLOCK_D=block, num_warps=WARPS,
        )  # fmt: skip
        return totals


def token_sums(uses: Sequence[Tokens], batch_size: int) -> list[tuple[list[int], TokenSums]]:
    """Returns the sums of all uses, and the numbers of those that each of them is of."""
    alike: dict[tuple, list[int]] = {}
    readables: list[Tokens] = []
    for number, use in enumerate(uses):
        y, features = use.y, use.y.shape[2]
        if y.stride(2) != 1:
            y = readable(y)
            use = use._replace(y=y)
        readables.append(use)
        s_m, s_t, _ = y.stride()
        # Address in bytes, strides and d in elements: a kernel reads all of them as such multiples.
        is_aligned = (y.data_ptr() | s_m | s_t | features) % ALIGNMENT == 0
        alike.setdefault((y.dtype, *_blocks(features), is_aligned), []).append(number)
    found = []
    for (dtype, *_, is_aligned), numbers in alike.items():
        for first in range(0, len(numbers), MOST):
            some = numbers[first : first + MOST]
            own = [readables[n] for n in some]
            found.append((some, _launch(own, batch_size, dtype, ALIGNMENT if is_aligned else 1)))
    return found


def _launch(uses: list[Tokens], batch_size: int, dtype: torch.dtype, aligned: int) -> TokenSums:
    device = uses[0].y.device
    tokens = programs = vocabulary = width = 0
    shapes, starts = [], [0]
    words: list[int] = []
    for ids, y, rows, samples in uses:
        count, features = ids.numel(), y.shape[2]
        words += (
            ids.data_ptr(), *ids.stride(), ids.shape[1], tokens, count,
            0 if samples is None else samples.data_ptr(),
            y.data_ptr(), *y.stride()[:2], features,
        )  # fmt: skip
        tokens += count
        programs += -(-count // NUMBERED)
        starts.append(programs)
        shapes.append((rows, features))
        vocabulary, width = max(vocabulary, rows), max(width, features)
    numbers = kept_table_on(device, (*starts, *words))
    table = numbers[len(starts) :]
    keys = torch.empty(tokens, dtype=torch.int64, device=device)
    owners = torch.empty_like(keys)
    if tokens:
        launch(
            _keys_kernel, (programs,), (table, numbers, keys, owners),
            (len(uses), batch_size, vocabulary), MOST=MOST, BLOCK=NUMBERED, num_warps=4,
        )  # fmt: skip
    keys, order = keys.sort(stable=True)
    starts_of_runs = _starts_of_runs(keys)
    sums = torch.empty(tokens, width, dtype=torch.float32, device=device)
    block, blocks = _blocks(width)
    squares = torch.zeros(tokens, blocks, dtype=torch.float32, device=device)
    if sums.numel():
        launch(
            _token_sums_kernel, (tokens * blocks,),
            (table, keys, order, starts_of_runs, sums, squares),
            (tokens, batch_size, vocabulary, width),
            DTYPE=dtype, ALIGNED=aligned, ROWS=ROWS, BLOCK_D=block, num_warps=WARPS,
        )  # fmt: skip
    # Sums of consecutive tokens, always in the same order.
    every = torch.arange(len(uses) * batch_size + 1, device=device)
    bounds = torch.searchsorted(owners, every)
    squares = torch.segment_reduce(squares.sum(1), "sum", offsets=bounds, initial=0.0)
    squares = squares.view(len(uses), batch_size)
    return TokenSums(shapes, batch_size, vocabulary, squares, sums, keys, starts_of_runs)


def _starts_of_runs(keys: Tensor) -> Tensor:
    """Returns where equal keys start in sorted ones [N], and N behind the last: [N + 1]."""
    number = torch.zeros_like(keys)
    number[1:] = (keys[1:] != keys[:-1]).cumsum(0)
    return torch.searchsorted(number, torch.arange(len(keys) + 1, device=keys.device))


@cache
def _blocks(features: int) -> tuple[int, int]:
    """Returns features of a block, and how many blocks."""
    block = min(BLOCK, next_power_of_two(max(1, features)))
    return block, ceil_div(features, block)


def token_squares_plain(ids: Tensor, y: Tensor) -> Tensor:
    """Reference implementation of `squares`, in float64: Σ y_it · y_is of equal tokens."""
    y = y.double()
    equal = ids[:, :, None] == ids[:, None, :]
    return (torch.bmm(y, y.mT) * equal).sum((1, 2)).float()


def weighted_tokens_plain(ids: Tensor, y: Tensor, coefficients: Tensor, vocabulary: int) -> Tensor:
    """Reference implementation of `weighted_sums`, in float64, rounded once."""
    good = coefficients > 0
    rows = coefficients[good].double()[:, None, None] * y[good].double()
    total = y.new_zeros(vocabulary, y.shape[2], dtype=torch.float64)
    return total.index_add_(0, ids[good].flatten().long(), rows.flatten(0, 1)).float()


if triton is not None:
    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["n_uses", "B", "V"])
    def _keys_kernel(
        p_table, p_starts, p_keys, p_owners, n_uses, B, V, MOST: tl.constexpr, BLOCK: tl.constexpr
    ):
        i_use, i_block = _row_of(p_starts, n_uses, MOST)
        p_use = p_table + 11 * i_use
        p_ids = tl.load(p_use).to(tl.pointer_type(tl.int64))
        s_m, s_t, T = tl.load(p_use + 1), tl.load(p_use + 2), tl.load(p_use + 3)
        i_first, n, samples = tl.load(p_use + 4), tl.load(p_use + 5), tl.load(p_use + 6)
        o_n = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < n
        b_id = tl.load(p_ids + o_n // T * s_m + o_n % T * s_t, mask=m_n, other=0)
        p_samples = samples.to(tl.pointer_type(tl.int64))
        b_sample = tl.load(p_samples + o_n // T, mask=o_n < tl.where(samples != 0, n, 0), other=0)
        b_sample = tl.where(samples != 0, b_sample, o_n // T)
        i_use = i_use.to(tl.int64)
        tl.store(p_keys + i_first + o_n, (i_use * V + b_id) * B + b_sample, mask=m_n)
        tl.store(p_owners + i_first + o_n, i_use * B + b_sample, mask=m_n)

    @triton.jit(do_not_specialize=["N", "B", "V"])
    def _token_sums_kernel(
        p_table, p_keys, p_order, p_starts, p_sums, p_squares, N, B, V, D_MOST,
        DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        n_blocks = tl.cdiv(D_MOST, BLOCK_D)
        i_run, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        o_start, o_end = tl.load(p_starts + i_run), tl.load(p_starts + i_run + 1)
        if o_start < N:
            p_use = p_table + 11 * (tl.load(p_keys + o_start) // B // V)
            T, i_first = tl.load(p_use + 3), tl.load(p_use + 4)
            p_y = tl.multiple_of(tl.load(p_use + 7).to(tl.pointer_type(DTYPE)), ALIGNED)
            s_m = tl.multiple_of(tl.load(p_use + 8), ALIGNED)
            s_t = tl.multiple_of(tl.load(p_use + 9), ALIGNED)
            D = tl.multiple_of(tl.load(p_use + 10), ALIGNED)
            b_sum = tl.zeros((ROWS, BLOCK_D), tl.float32)
            for i_n in range(o_start, o_end, ROWS):
                o_n = i_n + tl.arange(0, ROWS)
                b_order = tl.load(p_order + o_n, mask=o_n < o_end, other=0) - i_first
                p_row = p_y + (b_order // T) * s_m + (b_order % T) * s_t
                m_row = (o_n[:, None] < o_end) & (o_d[None, :] < D)
                b_row = tl.load(p_row[:, None] + o_d[None, :], mask=m_row, other=0)
                b_sum += b_row.to(tl.float32)
            b_total = tl.sum(b_sum, axis=0)
            tl.store(p_sums + tl.cast(i_run, tl.int64) * D_MOST + o_d, b_total, mask=o_d < D)
            # One of the run's own tokens keeps its square: those of a sample lie together.
            p_own = p_squares + tl.load(p_order + o_start) * n_blocks + i_block
            tl.store(p_own, tl.sum(b_total * b_total))

    @triton.jit(do_not_specialize=["N", "B", "V"])
    def _weighted_tokens_kernel(
        p_table, p_sums, p_keys, p_starts, p_c, N, B, V, D_MOST,
        ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        n_blocks = tl.cdiv(D_MOST, BLOCK_D)
        i_run, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        o_start = tl.load(p_starts + i_run)
        i_v = tl.load(p_keys + o_start, mask=o_start < N, other=0) // B
        i_before = tl.load(p_keys + o_start - 1, mask=o_start > 0, other=-B) // B
        p_use = p_table + 3 * (i_v // V)
        total = tl.load(p_use)
        if (o_start < N) & (i_v != i_before) & (total != 0):
            D = tl.load(p_use + 1)
            p_own_c = p_c + tl.load(p_use + 2) * B
            b_total = tl.zeros((ROWS, BLOCK_D), tl.float32)
            n_own = ROWS
            while n_own == ROWS:
                o_run = i_run + tl.arange(0, ROWS)
                b_start = tl.load(p_starts + o_run, mask=o_run < N, other=N)
                b_key = tl.load(p_keys + b_start, mask=b_start < N, other=-B)
                m_own = b_key // B == i_v
                b_c = tl.load(p_own_c + b_key % B, mask=m_own, other=0)
                m_row = (b_c > 0)[:, None] & (o_d[None, :] < D)
                p_row = p_sums + o_run[:, None].to(tl.int64) * D_MOST + o_d[None, :]
                b_total += b_c[:, None] * tl.load(p_row, mask=m_row, other=0)
                n_own = tl.sum(m_own.to(tl.int32))
                i_run += ROWS
            p_total = total.to(tl.pointer_type(tl.float32)) + i_v % V * D
            tl.store(p_total + o_d, tl.sum(b_total, axis=0), mask=o_d < D)
