"""Computes clipping coefficients from squared norms, and sorts them, in one launch each.

For K clipping groups and the parameters p of each, with `Norm`'s allowances for rounding e and f:

    b_k = Σ_p (√(max(n_p², 0) + e_p·S_p²) + f_p·S_p)²      an upper bound of a squared norm
    c_k = min(1, C_k / (√b_k · margin))   or   C_k / (√b_k · margin + γ)
    c_k = 0 for a sample of which any group's bound is not finite, or was in an earlier launch

Sorted, they are in the order of `weighted_product`. A sample's place is the number of those with a
smaller coefficient (or an equal one and a smaller number): B² comparisons of registers, for B up to
MOST.

A handful of numbers a sample; written with PyTorch's operators it is some fifteen launches, and ten
to sort, which matters where every layer has its own coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import available, launch, tl, triton

BLOCK = 128  # samples of a program
MOST = 128  # samples that are sorted, of which each program compares all with all


def clip_coefficients(
    squares: Tensor, scales: Tensor, errors: Tensor, starts: Tensor, clip_norms: Tensor,
    margin: float, gamma: float | None, bad: Tensor,
) -> Tensor:  # fmt: skip
    """Returns coefficients [K, B] float32.

    Args:
        squares, scales: [P, B] float32, parameters in order of their groups.
        errors: [P, 2] float32, e and f.
        starts: [K + 1] int32, where each group's parameters begin.
        clip_norms: [K] float64, thresholds C_k.
        margin: a factor on norms that covers rounding.
        gamma: γ of the automatic function; None: Abadi's.
        bad: [B] bool, samples to be left out, to which those found here are added.
    """
    groups, batch_size = clip_norms.shape[0], squares.shape[1]
    found = squares.new_empty(groups, batch_size)
    if batch_size:
        launch(
            _coefficients_kernel, (-(-batch_size // BLOCK),),
            (squares, scales, errors, starts, clip_norms, found, bad.view(torch.uint8)),
            (batch_size, groups, margin, float(gamma or 0)), AUTOMATIC=gamma is not None,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return found


def clip_coefficients_plain(
    squares: Tensor, scales: Tensor, errors: Tensor, starts: Tensor, clip_norms: Tensor,
    margin: float, gamma: float | None, bad: Tensor,
) -> Tensor:  # fmt: skip
    """Reference implementation of `clip_coefficients`, in float64, rounded once."""
    bounds = squared_bounds(squares, scales, errors, starts.tolist())
    norms, clip_norms = bounds.sqrt() * margin, clip_norms.double()[:, None]
    if gamma is None:
        c = (clip_norms / norms).clamp_max(1)
    else:
        c = (clip_norms / (norms + gamma)).clamp_max(torch.finfo(torch.float32).max)
    bad |= ~(bounds.float() < torch.inf).all(0)
    return torch.where(bad, 0, c).float()


def squared_bounds(
    squares: Tensor, scales: Tensor, errors: Tensor, starts: Sequence[int]
) -> Tensor:
    """Returns b [K, B] float64, as `clip_coefficients` forms it."""
    e, f = errors.double()[:, :1], errors.double()[:, 1:]
    squares = squares.double()
    squares = torch.where(squares.isfinite(), squares.clamp_min(0), torch.inf)
    terms = ((squares + e * scales.double() ** 2).sqrt() + f * scales.double()).square()
    return torch.stack([terms[first:last].sum(0) for first, last in pairwise(starts)])


@dataclass(frozen=True)
class SortedCoefficients:
    """Coefficients of K clipping groups, in the order in which the kernel takes samples.

    All on the device.

    Attributes:
        order: [K, B] int32, sample numbers by ascending coefficient.
        values: [K, B] float32, the coefficients in that order.
        first: [K] int32, how many are zero.
    """

    order: Tensor
    values: Tensor
    first: Tensor

    @classmethod
    def of(cls, coefficients: Tensor) -> SortedCoefficients:
        """Returns those of c [K, B] or [B] float32, not negative, B at least 1; NaN counts as 0."""
        c = coefficients.view(-1, coefficients.shape[-1]).contiguous()
        if c.shape[1] > MOST or not available(c.device, c.dtype):
            return cls.plain(c)
        groups, batch_size = c.shape
        found = cls(
            torch.empty_like(c, dtype=torch.int32), torch.empty_like(c),
            c.new_empty(groups, dtype=torch.int32),
        )  # fmt: skip
        launch(
            _sort_kernel, (groups,), (c, found.order, found.values, found.first), (batch_size,),
            BLOCK=16 if batch_size <= 16 else MOST, num_warps=4,
        )  # fmt: skip
        return found

    @classmethod
    def plain(cls, c: Tensor) -> SortedCoefficients:
        """Reference implementation, for c [K, B]."""
        c, order = c.nan_to_num(0, torch.inf).sort(dim=1, stable=True)
        return cls(order.int(), c, (c <= 0).sum(1).int())


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of some clipping groups, on the device.

    Attributes:
        values: c [rows, B] float32.
        rows: clipping group -> its row.
    """

    values: Tensor
    rows: dict[int, int]

    @cached_property
    def sorted(self) -> SortedCoefficients:
        return SortedCoefficients.of(self.values)


if triton is not None:

    @triton.jit(do_not_specialize=["B", "K"])
    def _coefficients_kernel(
        p_squares, p_scales, p_errors, p_starts, p_limits, p_found, p_bad, B, K, margin, gamma,
        AUTOMATIC: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        m_b = o_b < B
        b_bad = tl.load(p_bad + o_b, mask=m_b, other=0).to(tl.int32)
        for i_group in range(K):
            b_bound = tl.zeros((BLOCK,), tl.float64)  # thousands of small ones beside a large one
            for i in range(tl.load(p_starts + i_group), tl.load(p_starts + i_group + 1)):
                e, f = tl.load(p_errors + 2 * i), tl.load(p_errors + 2 * i + 1)
                b_square = tl.load(p_squares + i * B + o_b, mask=m_b, other=0)
                b_scale = tl.load(p_scales + i * B + o_b, mask=m_b, other=0)
                # Below 0 by rounding: 0. Not finite, minus infinity too: not a norm to clip by.
                b_finite = tl.abs(b_square) < float("inf")
                b_square = tl.where(b_finite, tl.where(b_square < 0, 0.0, b_square), float("inf"))
                b_norm = (tl.sqrt_rn(b_square + e * b_scale * b_scale) + f * b_scale).to(tl.float64)
                b_bound += b_norm * b_norm
            b_rounded = b_bound.to(tl.float32)
            b_bad = tl.where(b_rounded < float("inf"), b_bad, 1)
            tl.store(p_found + i_group * B + o_b, b_rounded, mask=m_b)
        tl.store(p_bad + o_b, b_bad.to(tl.uint8), mask=m_b)
        for i_group in range(K):
            b_bound = tl.load(p_found + i_group * B + o_b, mask=m_b, other=0)
            b_norm = tl.sqrt_rn(b_bound) * margin
            limit = tl.load(p_limits + i_group).to(tl.float32)
            if AUTOMATIC:
                b_c = tl.minimum(tl.div_rn(limit, b_norm + gamma), 3.4e38)  # an inf times 0 is NaN
            else:
                b_c = tl.where(b_norm > limit, tl.div_rn(limit, b_norm), 1.0)
            tl.store(p_found + i_group * B + o_b, tl.where(b_bad == 0, b_c, 0.0), mask=m_b)

    @triton.jit(do_not_specialize=["B"])
    def _sort_kernel(p_c, p_order, p_values, p_first, B, BLOCK: tl.constexpr):
        i_group = tl.program_id(0)
        o_b = tl.arange(0, BLOCK)
        b_c = tl.load(p_c + i_group * B + o_b, mask=o_b < B, other=float("inf"))
        b_c = tl.where(b_c == b_c, b_c, 0.0)  # two samples in one place would leave one unset
        b_precedes = (b_c[None, :] < b_c[:, None]) | (
            (b_c[None, :] == b_c[:, None]) & (o_b[None, :] < o_b[:, None])
        )
        b_place = tl.sum(b_precedes.to(tl.int32), 1)
        tl.store(p_order + i_group * B + b_place, o_b, mask=o_b < B)
        tl.store(p_values + i_group * B + b_place, b_c, mask=o_b < B)
        tl.store(p_first + i_group, tl.sum((b_c <= 0).to(tl.int32), 0))
