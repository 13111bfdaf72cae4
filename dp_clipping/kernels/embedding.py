"""Adds up a sample's rows of equal tokens in an embedding and takes norms, in one pass.

    s_iv = Σ_{t: id_it = v} y_it  [d],   ‖G_i‖² = Σ_v ‖s_iv‖²,   total_v = Σ_i c_i s_iv  [d]

One stable sort by token and sample puts the rows of each s_iv next to each other (a run) and the
runs of a token behind one another. How many runs there are, only the device knows: there are as
many programs as tokens, and those without a run end at once. Each adds up one run, or one token's
runs, always in the same order and without atomics, so that results do not vary.

A run of a sample with c = 0 is left out by not loading it: what it holds may not be finite.

Traffic: y read once, at most B·T·d float32 values written, and read once for the total, V·d float32
values of which are written. Sorting B·T numbers is little beside them unless d is very small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.launch.tiles import (
    ceil_div,
    launch,
    next_power_of_two,
    readable,
    triton,
)

if triton is not None:
    import triton.language as tl

BLOCK = 256  # features of a program: most runs are one row, which one warp loads at once
ROWS = 8  # whose loads are in flight together
WARPS = 1


@dataclass(frozen=True)
class TokenSums:
    """The sums s_iv of one use and where they are; R runs of N = B·T tokens, all on the device.

    Attributes:
        squares: [B] float32, ‖G_i‖² of the sums as they are stored.
        sums: [N, d] float32, run by run; what is behind the R-th row was never written.
        keys: [N] int64, token · B + sample of the sorted tokens.
        starts: [N + 1] int64, where each run starts in `keys`, and N behind the last.
    """

    squares: Tensor
    sums: Tensor
    keys: Tensor
    starts: Tensor

    @classmethod
    def of(cls, ids: Tensor, y: Tensor) -> TokenSums:
        """Returns the sums of tokens and their output gradients.

        Args:
            ids: [B, T], int64 or int32.
            y: [B, T, d], float32, bfloat16 or float16, any strides; zero at padding tokens.
        """
        samples = torch.arange(len(ids), device=ids.device)[:, None]
        keys, sums, starts, squares = _sums_of_runs(ids, samples, y, len(ids))
        return cls(squares.view(ids.shape).sum(1), sums, keys, starts)

    @classmethod
    def of_rows(cls, ids: Tensor, samples: Tensor, y: Tensor, batch_size: int) -> TokenSums:
        """Returns the sums where samples have different numbers of tokens.

        Args:
            ids: [N], int64 or int32.
            samples: [N] int64, whose tokens these are, in ascending order.
            y: [N, d], as in `of`.
        """
        columns = ids[:, None], samples[:, None], y[:, None]
        keys, sums, starts, squares = _sums_of_runs(*columns, batch_size)
        bounds = torch.searchsorted(samples, torch.arange(batch_size + 1, device=ids.device))
        # Sums of consecutive tokens, always in the same order.
        squares = torch.segment_reduce(squares, "sum", offsets=bounds, initial=0.0)
        return cls(squares, sums, keys, starts)

    held = staticmethod(lambda _: ())  # nobody else has them
    may_be_recomputed = False

    def take_norm(self, _keep: bool) -> Norm:
        """Returns `squares`."""
        return Norm(self.squares)

    def weighted_sum(self, coefficients: Tensor, vocabulary: int) -> Tensor:
        """Returns Σ_i c_i G_i [V, d] float32, over the samples with c_i > 0; c [B] float32."""
        features = self.sums.shape[1]
        total = self.sums.new_zeros(vocabulary, features)
        if not self.sums.numel():
            return total
        block, blocks = _blocks(features)
        launch(
            _weighted_tokens_kernel, (len(self.keys) * blocks,),
            (self.sums, self.keys, self.starts, coefficients.contiguous(), total),
            (len(self.keys), len(coefficients), features),
            ROWS=ROWS, BLOCK_D=block, num_warps=WARPS,
        )  # fmt: skip
        return total


def _sums_of_runs(
    ids: Tensor, samples: Tensor, y: Tensor, batch_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns keys, sums and starts as `TokenSums` has them, and squares [N] that lie somewhere in
    the tokens of their sample.

    Args:
        ids: [M, T], N = M·T tokens.
        samples: [M, T] or [M, 1], whose they are, in ascending order.
        y: [M, T, d].
    """
    y = readable(y)
    _, tokens, features = y.shape
    keys, order, starts = _runs(ids, samples, batch_size)
    sums = y.new_empty(len(keys), features, dtype=torch.float32)
    block, blocks = _blocks(features) if features else (1, 1)
    squares = y.new_zeros(len(keys), blocks, dtype=torch.float32)
    if sums.numel():
        launch(
            _token_sums_kernel, (len(keys) * blocks,), (y, order, starts, sums, squares),
            (len(keys), tokens, features, y.stride(0), y.stride(1)),
            ROWS=ROWS, BLOCK_D=block, num_warps=WARPS,
        )  # fmt: skip
    return keys, sums, starts, squares.sum(1)


def _runs(ids: Tensor, samples: Tensor, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sorted keys [N], the tokens that have them [N], starts [N + 1]."""
    keys, order = (ids.long() * batch_size + samples).flatten().sort(stable=True)
    number = torch.zeros_like(keys)
    number[1:] = (keys[1:] != keys[:-1]).cumsum(0)
    return keys, order, torch.searchsorted(number, torch.arange(len(keys) + 1, device=ids.device))


@lru_cache(maxsize=256)
def _blocks(features: int) -> tuple[int, int]:
    """Returns features of a block, and how many blocks."""
    block = min(BLOCK, next_power_of_two(features))
    return block, ceil_div(features, block)


def token_squares_plain(ids: Tensor, y: Tensor) -> Tensor:
    """Reference implementation of `squares`, in float64: Σ y_it · y_is of equal tokens."""
    y = y.double()
    equal = ids[:, :, None] == ids[:, None, :]
    return (torch.bmm(y, y.mT) * equal).sum((1, 2)).float()


def weighted_tokens_plain(ids: Tensor, y: Tensor, coefficients: Tensor, vocabulary: int) -> Tensor:
    """Reference implementation of `weighted_sum`, in float64, rounded once."""
    good = coefficients > 0
    rows = coefficients[good].double()[:, None, None] * y[good].double()
    total = y.new_zeros(vocabulary, y.shape[2], dtype=torch.float64)
    return total.index_add_(0, ids[good].flatten().long(), rows.flatten(0, 1)).float()


if triton is not None:

    @triton.jit
    def _token_sums_kernel(
        p_y, p_order, p_starts, p_sums, p_squares, N, T, D, s_b, s_t,
        ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        n_blocks = tl.cdiv(D, BLOCK_D)
        i_run, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        o_start, o_end = tl.load(p_starts + i_run), tl.load(p_starts + i_run + 1)
        if o_start < N:
            b_sum = tl.zeros((ROWS, BLOCK_D), tl.float32)
            for i_n in range(o_start, o_end, ROWS):
                o_n = i_n + tl.arange(0, ROWS)
                b_order = tl.load(p_order + o_n, mask=o_n < o_end, other=0)
                p_row = p_y + (b_order // T) * s_b + (b_order % T) * s_t
                m_row = (o_n[:, None] < o_end) & (o_d[None, :] < D)
                b_row = tl.load(p_row[:, None] + o_d[None, :], mask=m_row, other=0)
                b_sum += b_row.to(tl.float32)
            b_total = tl.sum(b_sum, axis=0)
            tl.store(p_sums + tl.cast(i_run, tl.int64) * D + o_d, b_total, mask=o_d < D)
            # One of the run's own tokens keeps its square: those of a sample lie together.
            p_own = p_squares + tl.load(p_order + o_start) * n_blocks + i_block
            tl.store(p_own, tl.sum(b_total * b_total))

    @triton.jit
    def _weighted_tokens_kernel(
        p_sums, p_keys, p_starts, p_c, p_total, N, B, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
    ):
        n_blocks = tl.cdiv(D, BLOCK_D)
        i_run, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        o_start = tl.load(p_starts + i_run)
        i_v = tl.load(p_keys + o_start, mask=o_start < N, other=0) // B
        i_before = tl.load(p_keys + o_start - 1, mask=o_start > 0, other=-B) // B
        if (o_start < N) & (i_v != i_before):
            b_total = tl.zeros((ROWS, BLOCK_D), tl.float32)
            n_own = ROWS
            while n_own == ROWS:
                o_run = i_run + tl.arange(0, ROWS)
                b_start = tl.load(p_starts + o_run, mask=o_run < N, other=N)
                b_key = tl.load(p_keys + b_start, mask=b_start < N, other=-B)
                m_own = b_key // B == i_v
                b_c = tl.load(p_c + b_key % B, mask=m_own, other=0)
                m_row = (b_c > 0)[:, None] & (o_d[None, :] < D)
                p_row = p_sums + o_run[:, None].to(tl.int64) * D + o_d[None, :]
                b_total += b_c[:, None] * tl.load(p_row, mask=m_row, other=0)
                n_own = tl.sum(m_own.to(tl.int32))
                i_run += ROWS
            tl.store(p_total + i_v * D + o_d, tl.sum(b_total, axis=0), mask=o_d < D)
