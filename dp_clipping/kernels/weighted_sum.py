"""Clipped sum of kept per-sample gradients: every value is read once.

    Σ_i c_i G_i  [n] in float32, over the samples with c_i > 0

A sample with c = 0 is left out by not loading it, never by multiplying with zero: what it holds may
not be finite. So nobody has to ask the device which samples those are.

Traffic: the selected samples' values read once, n float32 values written; operations are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dp_clipping.kernels.tiles import DTYPES, triton

if triton is not None:
    import triton.language as tl

BLOCK = 2048
WARPS = 4
UNROLLED = 16  # samples whose loads are in flight together


def serves(gradients: Tensor) -> bool:
    """Whether this kernel, and not its plain twin, forms the sum."""
    return triton is not None and gradients.is_cuda and gradients.dtype in DTYPES


def weighted_sum(gradients: Tensor, coefficients: Tensor) -> Tensor:
    """Σ_i c_i G_i: float32, of the shape of one sample.

    Args:
        gradients: G [B, *shape], float32, bfloat16 or float16.
        coefficients: c [B] float32, not negative.
    """
    gradients, coefficients = gradients.contiguous(), coefficients.contiguous()
    batch_size, shape = len(gradients), gradients.shape[1:]
    total = gradients.new_empty(shape, dtype=torch.float32)
    n = total.numel()
    if not (batch_size and n):
        return total.zero_()
    _weighted_sum_kernel[(triton.cdiv(n, BLOCK),)](
        gradients, coefficients, total, n, batch_size, batch_size if batch_size <= UNROLLED else 0,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return total


def weighted_sum_plain(gradients: Tensor, coefficients: Tensor) -> Tensor:
    """The plain twin, in float64, rounded once."""
    good = coefficients > 0
    shape = gradients.shape[1:]
    rows = gradients[good].reshape(int(good.sum()), shape.numel()).double()
    return (coefficients[good].double() @ rows).float().view(shape)


if triton is not None:
    # Batches and lengths change: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["B"])
    def _weighted_sum_kernel(p_g, p_c, p_total, n, B, UNROLL: tl.constexpr, BLOCK: tl.constexpr):
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_total = tl.zeros((BLOCK,), tl.float32)
        if UNROLL:
            for i in tl.static_range(UNROLL):
                b_total += _scaled(p_g, p_c, i, o_n, n)
        else:
            for i in range(B):
                b_total += _scaled(p_g, p_c, i, o_n, n)
        tl.store(p_total + o_n, b_total, mask=o_n < n)

    @triton.jit
    def _scaled(p_g, p_c, i, o_n, n):
        """c_i times values o_n of sample i, zero without a load if c_i is."""
        c = tl.load(p_c + i)
        stop = tl.where(c > 0, n, 0)
        return c * tl.load(p_g + tl.cast(i, tl.int64) * n + o_n, mask=o_n < stop, other=0).to(
            tl.float32
        )
