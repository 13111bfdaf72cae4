"""Computes per-sample gradients of RMSNorm's weight, LayerNorm's weight and bias, and other biases.

    x̂_it = (x_it − mean_it) · rstd_it,   G_i = Σ_t y_it · x̂_it  [d],   for the bias Σ_t y_it  [d]

RMSNorm has no mean and no bias, and of a linear layer only the bias is asked for. Each program
takes a piece of one sample's tokens and a block of features; x̂ and the product exist in registers
only. A few long samples of few features would leave most of the device idle, so their tokens are
split over programs, whose sums are added afterwards: these are sums, not norms, so that any split
will do. A network has two normalisations and six biases a block, each of little work; one launch
serves many.

Traffic: y and x are read once, pieces·B·d float32 values are written for each result.
"""

from __future__ import annotations

from collections.abc import Sequence
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

BLOCK = 128  # features of a program
ELEMENTS = 2048  # values of y that a program loads at a time
WARPS = 4
PROGRAMS = 1024  # fewer leave processors idle: pieces are made until there are as many
COPIED_BYTES = 1 << 26  # of operands that the kernel cannot read as they are: copied at a time
LEAST_STEPS = 8  # loads of a piece: shorter ones cost more in sums than they gain


class Normalized(NamedTuple):
    """The operands from which the G of one normalisation, or of one bias, are computed.

    Attributes:
        y: output gradients [B, T, d], float32, bfloat16 or float16, any strides.
        x: inputs [B, T, d], likewise; None: only the bias's G are asked for.
        rstd: [B, T] of each token, float32 (any of the dtypes above); None without x.
        mean: the same; None for RMSNorm.
        with_bias: the bias's G are asked for too.
    """

    y: Tensor
    x: Tensor | None = None
    rstd: Tensor | None = None
    mean: Tensor | None = None
    with_bias: bool = False

    def readable(self) -> Normalized:
        """Returns the operands in a layout that the kernel can read."""
        mean = self.mean
        if self.x is None or self.rstd is None:
            return self if self.y.stride(2) == 1 else Normalized(readable(self.y), with_bias=True)
        is_row = self.rstd.is_contiguous() and (mean is None or mean.is_contiguous())
        if is_row and self.y.stride(2) == self.x.stride(2) == 1:
            return self
        mean = None if mean is None else mean.contiguous()
        return Normalized(
            readable(self.y), readable(self.x), self.rstd.contiguous(), mean, self.with_bias
        )


def norm_layer_gradients(
    uses: Sequence[Normalized],
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Returns G [B, d] float32 of each weight and bias, or None where it is not asked for.

    Few launches serve those that are alike, and a result does not depend on what shares its launch.
    """
    found: list = [None] * len(uses)
    alike: dict[tuple, list[int]] = {}
    for number, (y, x, rstd, mean, with_bias) in enumerate(uses):
        # The last is whether rows may be read 16 bytes at a time.
        key: tuple = y.shape, y.stride(), y.dtype, y.data_ptr() % ALIGNMENT == 0
        if x is not None and rstd is not None:
            of_mean = None if mean is None else (mean.dtype, mean.is_contiguous())
            others = x.stride(), x.dtype, rstd.dtype, rstd.is_contiguous(), of_mean, with_bias
            key = *key[:-1], *others, key[-1] and x.data_ptr() % ALIGNMENT == 0
        alike.setdefault(key, []).append(number)
    for kind, numbers in alike.items():
        first, each = uses[numbers[0]], len(numbers)
        is_copied = first.readable() is not first
        if is_copied:
            x_bytes = 0 if first.x is None else first.x.nbytes
            each = max(1, COPIED_BYTES // max(1, first.y.nbytes + x_bytes))
        for start in range(0, len(numbers), each):
            own = numbers[start : start + each]
            several, is_aligned = [uses[n] for n in own], kind[-1]
            if is_copied:
                several = [use.readable() for use in several]
                read = [x for use in several for x in use[:2] if x is not None]
                is_aligned = not any(x.data_ptr() % ALIGNMENT for x in read)
            total = _launch(several, is_aligned)
            formed = total.flatten(0, 1).unbind(0)
            pairs: list[tuple[Tensor | None, Tensor | None]]
            if first.x is None:
                pairs = [(None, bias) for bias in formed]
            elif first.with_bias:
                pairs = list(zip(formed[::2], formed[1::2], strict=True))
            else:
                pairs = [(weight, None) for weight in formed]
            for number, pair in zip(own, pairs, strict=True):
                found[number] = pair
    return found


def _launch(uses: list[Normalized], aligned: bool) -> Tensor:
    """Returns [uses, 1 or 2, B, d], the weight's before the bias's.

    Args:
        aligned: y and x of all start at multiples of 16 bytes.
    """
    first = uses[0]
    y = first.y
    x, rstd = (y, y) if first.x is None or first.rstd is None else (first.x, first.rstd)
    batch_size, tokens, features = y.shape
    with_weight, with_mean = first.x is not None, first.mean is not None
    outputs = with_weight + first.with_bias
    if not y.numel():
        return y.new_zeros(len(uses), outputs, batch_size, features, dtype=torch.float32)
    block = min(BLOCK, next_power_of_two(features))
    rows = ELEMENTS // block
    blocks = ceil_div(features, block)
    # As if each were alone: the order of its sum must not tell what else was launched.
    piece, pieces = _split(tokens, rows, batch_size * blocks)
    shape = (len(uses), outputs, pieces, batch_size, features)
    partial = torch.empty(shape, dtype=torch.float32, device=y.device)
    addresses = [0 if one is None else one.data_ptr() for use in uses for one in use[:4]]
    table = kept_table_on(y.device, tuple(addresses))
    strides = y.stride(0), y.stride(1), x.stride(0), x.stride(1)
    launch(
        _norm_layer_kernel, (len(uses) * pieces * batch_size * blocks,), (table, partial),
        (batch_size, tokens, features, *strides, piece, pieces), Y=y.dtype, X=x.dtype,
        STATISTICS=rstd.dtype, ALIGNED=ALIGNMENT if aligned else 1, WEIGHT=with_weight,
        MEAN=with_mean, BIAS=first.with_bias, BLOCK_T=rows, BLOCK_D=block, num_warps=WARPS,
    )  # fmt: skip
    return partial[:, :, 0] if pieces == 1 else partial.sum(2, dtype=torch.float64).float()


def _split(tokens: int, rows: int, programs: int) -> tuple[int, int]:
    """Returns tokens of a piece, a multiple of `rows`, and how many; `programs` unsplit."""
    wanted, loads = -(-PROGRAMS // programs), -(-tokens // rows)
    piece = rows * max(-(-loads // wanted), LEAST_STEPS)
    return piece, -(-tokens // piece)


if triton is not None:
    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["B", "T", "n_piece", "n_pieces"])
    def _norm_layer_kernel(
        p_table, p_partial, B, T, D, s_yb, s_yt, s_xb, s_xt, n_piece, n_pieces,
        Y: tl.constexpr, X: tl.constexpr, STATISTICS: tl.constexpr, ALIGNED: tl.constexpr,
        WEIGHT: tl.constexpr, MEAN: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        n_blocks = tl.cdiv(D, BLOCK_D)
        i_row, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
        i_use, i_part = i_row // (n_pieces * B), i_row % (n_pieces * B)
        i_piece, i_b = i_part // B, (i_part % B).to(tl.int64)
        p_use = p_table + 4 * i_use
        p_y = tl.multiple_of(tl.load(p_use).to(tl.pointer_type(Y)), ALIGNED)
        p_x = tl.multiple_of(tl.load(p_use + 1).to(tl.pointer_type(X)), ALIGNED)
        p_rstd = tl.load(p_use + 2).to(tl.pointer_type(STATISTICS))
        p_mean = tl.load(p_use + 3).to(tl.pointer_type(STATISTICS))
        o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
        b_weight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        b_bias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for i_t in range(i_piece * n_piece, min((i_piece + 1) * n_piece, T), BLOCK_T):
            o_t = i_t + tl.arange(0, BLOCK_T)
            m_t = o_t < T
            m_tile = m_t[:, None] & (o_d[None, :] < D)
            o_row = o_t[:, None].to(tl.int64)
            b_y = tl.load(p_y + i_b * s_yb + o_row * s_yt + o_d[None, :], mask=m_tile, other=0)
            b_y = b_y.to(tl.float32)
            if WEIGHT:
                b_x = tl.load(p_x + i_b * s_xb + o_row * s_xt + o_d[None, :], mask=m_tile, other=0)
                b_x = b_x.to(tl.float32)
                if MEAN:
                    b_mean = tl.load(p_mean + i_b * T + o_t, mask=m_t, other=0).to(tl.float32)
                    b_x -= b_mean[:, None]
                b_rstd = tl.load(p_rstd + i_b * T + o_t, mask=m_t, other=0).to(tl.float32)
                b_weight += b_y * (b_x * b_rstd[:, None])
            if BIAS:
                b_bias += b_y
        n_results = tl.cast(n_pieces, tl.int64) * B * D  # of a use's weight, or bias
        p_own = p_partial + i_use * (2 * n_results if WEIGHT and BIAS else n_results)
        p_own += tl.cast(i_part, tl.int64) * D + o_d
        if WEIGHT:
            tl.store(p_own, tl.sum(b_weight, axis=0), mask=o_d < D)
            p_own += n_results
        if BIAS:
            tl.store(p_own, tl.sum(b_bias, axis=0), mask=o_d < D)
