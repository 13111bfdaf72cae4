"""Sorts clipping coefficients into the order of `weighted_product`, in one launch.

A sample's place is the number of those with a smaller coefficient (or an equal one and a smaller
number): B² comparisons of registers, for B up to MOST. Sorting with PyTorch's operators is some ten
launches, which matters where every layer has its own coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import available, launch, tl, triton

MOST = 128  # samples, of which each program compares all with all


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


if triton is not None:

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
