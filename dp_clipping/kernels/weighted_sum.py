"""Computes the clipped sum of stored per-sample gradients; reads every value once.

    Σ_i c_i G_i  [n] in float32, over the samples with c_i > 0

A sample with c = 0 is left out by not loading it, never by multiplying with zero: what it holds may
not be finite. So the host need not read which samples those are.

Traffic: the selected samples' values read once, n float32 values written; operations are few. Where
samples are many and small, parts of them are summed side by side, and then the parts; a program
then loads several samples at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import kept_table_on, launch, tl, triton

if triton is not None:
    from dp_clipping.kernels.launch.tiles import _row_of

BLOCK = 2048
MOST = 128  # of one launch: a network has many small ones
WARPS = 4
UNROLLED = 16  # samples whose loads are in flight together
PROGRAMS = 1056  # eight for each processor of an H200: fewer divide the samples
MANY = 1024  # samples, from which on those of few values are loaded several at once
FEW = (16, 128)  # values that count as few: the width of a block then
ALIGNED = 16  # values: samples that start at multiples of it are read in 16 bytes

Row = tuple[int, Tensor, int, int]
"""A row of a launch: the address of G, its sum, the number of values, and the clipping group."""


def weighted_sums(
    gradients: Sequence[Tensor], coefficients: Tensor, groups: Sequence[int]
) -> list[Tensor]:
    """Returns Σ_i c_i G_i of each: float32, of the shape of one sample.

    Args:
        gradients: G [B, *shape] each, float32, bfloat16 or float16. Few launches serve many.
        coefficients: c [K, B] float32, not negative.
        groups: which of the K clipping groups each G belongs to.
    """
    totals = [g.new_empty(g.shape[1:], dtype=torch.float32) for g in gradients]
    gradients = [g.contiguous() for g in gradients]
    coefficients = coefficients.contiguous()
    alike: dict[tuple, list[Row]] = {}
    for g, total, group in zip(gradients, totals, groups, strict=True):
        if 0 in g.shape:
            total.zero_()
            continue
        # Declares addresses, and samples' sizes, to be multiples of 16 bytes.
        address, size = g.data_ptr(), total.numel()
        width = BLOCK
        if size <= FEW[-1] and g.shape[0] >= MANY:
            width = FEW[0] if size <= FEW[0] else FEW[-1]
        key = (g.dtype, g.device, size % ALIGNED == address % ALIGNED == 0, width)
        if key not in alike:
            alike[key] = []
        alike[key].append((address, total, size, group))
    for (dtype, _, aligned, width), rows in alike.items():
        for first in range(0, len(rows), MOST):
            _launch(rows[first : first + MOST], coefficients, dtype, aligned, width)
    return totals


def weighted_sum(gradients: Tensor, coefficients: Tensor) -> Tensor:
    """Calls `weighted_sums` for one G [B, *shape] with c [B]."""
    return weighted_sums([gradients], coefficients[None], [0])[0]


def _launch(
    rows: list[Row], coefficients: Tensor, dtype: torch.dtype, aligned: bool, width: int = BLOCK
) -> None:
    """Launches the kernel on G of one dtype.

    Args:
        width: of a block; with fewer values than `BLOCK` it has as many more samples.
    """
    starts, words = [0], []
    for address, _, size, group in rows:
        starts.append(starts[-1] - (-size // width))
        words += [address, 0, size, group]
    batch_size, samples = coefficients.shape[1], BLOCK // width
    splits = min(max(1, PROGRAMS // starts[-1]), -(-batch_size // (UNROLLED * samples)))
    share = -(-batch_size // splits)
    splits = -(-batch_size // share)
    ends = [0]
    if splits > 1:  # parts [splits, size] of every sum, in one allocation
        for _, _, size, _ in rows:
            ends.append(ends[-1] - (-splits * size // ALIGNED) * ALIGNED)
        parts = coefficients.new_empty(ends[-1])
    for n, (_, total, _, _) in enumerate(rows):
        own = total.data_ptr() if splits == 1 else parts.data_ptr() + 4 * ends[n]
        words[4 * n + 1] = own
    numbers = kept_table_on(coefficients.device, (*starts, *words))
    launch(
        _weighted_sum_kernel, (starts[-1], splits),
        (numbers[len(starts) :], numbers, coefficients), (len(rows), batch_size, share),
        UNROLL=batch_size if batch_size <= UNROLLED else 0, DTYPE=dtype,
        ALIGNED=ALIGNED if aligned else 1, MOST=MOST, SAMPLES=samples, BLOCK=width,
        num_warps=WARPS,
    )  # fmt: skip
    if splits > 1:
        ones = coefficients.new_ones(1, splits)
        rows = [(at, total, n, 0) for at, (_, total, n, _) in zip(words[1::4], rows, strict=True)]
        _launch(rows, ones, torch.float32, aligned, width if splits >= MANY else BLOCK)


def weighted_sum_plain(gradients: Tensor, coefficients: Tensor) -> Tensor:
    """Reference implementation of `weighted_sum`, in float64, rounded once."""
    good = coefficients > 0
    shape = gradients.shape[1:]
    rows = gradients[good].reshape(int(good.sum()), shape.numel()).double()
    return (coefficients[good].double() @ rows).float().view(shape)


if triton is not None:
    # Batches change: no compiled variant may depend on them, but those that are unrolled.
    @triton.jit(do_not_specialize=["n_rows", "B", "share"])
    def _weighted_sum_kernel(
        p_rows, p_starts, p_c, n_rows, B, share, UNROLL: tl.constexpr, DTYPE: tl.constexpr,
        ALIGNED: tl.constexpr, MOST: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_row, i_block = _row_of(p_starts, n_rows, MOST)
        p_row = p_rows + 4 * i_row
        p_g = tl.multiple_of(tl.load(p_row).to(tl.pointer_type(DTYPE)), ALIGNED)
        p_total = tl.multiple_of(tl.load(p_row + 1).to(tl.pointer_type(tl.float32)), ALIGNED)
        n = tl.multiple_of(tl.load(p_row + 2), ALIGNED)
        p_total += tl.program_id(1) * n
        i_first = tl.program_id(1) * share
        i_stop = tl.minimum(i_first + share, B)
        p_c += tl.load(p_row + 3) * B
        o_n = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_total = tl.zeros((BLOCK,), tl.float32)
        if SAMPLES > 1:
            b_several = tl.zeros((SAMPLES, BLOCK), tl.float32)
            for i in tl.range(i_first, i_stop, SAMPLES, loop_unroll_factor=4):
                o_i = i + tl.arange(0, SAMPLES)
                b_c = tl.load(p_c + o_i, mask=o_i < i_stop, other=0)[:, None]
                p_own = p_g + o_i[:, None].to(tl.int64) * n + o_n[None, :]
                b_g = tl.load(p_own, mask=(b_c > 0) & (o_n[None, :] < n), other=0)
                b_several += b_c * b_g.to(tl.float32)
            b_total = tl.sum(b_several, axis=0)
        elif UNROLL:
            for i in tl.static_range(UNROLL):
                b_total += _scaled(p_g, p_c, i, o_n, n)
        else:
            for i in tl.range(i_first, i_stop, loop_unroll_factor=4):
                b_total += _scaled(p_g, p_c, i, o_n, n)
        tl.store(p_total + o_n, b_total, mask=o_n < n)

    @triton.jit
    def _scaled(p_g, p_c, i, o_n, n):
        """Returns c_i times values o_n of sample i; loads nothing if c_i is zero."""
        c = tl.load(p_c + i)
        stop = tl.where(c > 0, n, 0)
        b_g = tl.load(p_g + tl.cast(i, tl.int64) * n + o_n, mask=o_n < stop, other=0)
        return c * b_g.to(tl.float32)
