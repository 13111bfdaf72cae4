"""Errors of the size of rounding, which tell what a difference between two runs may be."""

import torch
from torch import Tensor

from dp_clipping.distributed.dtensor import is_sharded


def rounded(
    x: Tensor, draw: torch.Generator | None, dtype: torch.dtype | None = None
) -> Tensor:  # fmt: skip
    """Returns x with errors of the size of its dtype's rounding, which whole numbers have none of.

    One part of an error follows from the number: what is equal stays equal, so that comparisons,
    and the softmax of a row of one large constant, stay what they are. The other one has the signs
    of the numbers: sums change by it as their terms are large, however small the sum is, as by the
    order of the terms.

    Args:
        dtype: in which x was computed; default: its own.
    """
    if draw is None or is_sharded(x) or not x.is_floating_point():
        return x
    eps, values = torch.finfo(dtype or x.dtype).eps, x.detach()
    errors = _of_bits(values, draw.initial_seed())
    if eps <= torch.finfo(torch.float32).eps:  # sums of others have finer rounding than they
        common = torch.randn((), generator=draw, device=x.device, dtype=torch.float32)
        errors = errors + common * values.sign()
    is_whole = (values == values.round()) & (values.abs() < 1 / eps)
    errors = (errors * (eps / 4)).masked_fill(is_whole, 0)
    y = (x * (1 + errors.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)
    return torch.where(y.isfinite(), y, x)  # the largest number has none above it


def _of_bits(x: Tensor, seed: int) -> Tensor:
    """Returns numbers of mean 0 and variance 1, float32, the same for equal numbers of x."""
    wide = x.dtype == torch.float64
    bits = x.view(torch.int64) if wide else x.float().view(torch.int32).long()
    bits = (bits + seed) * -0x61C8864680B583EB  # an odd number, as Knuth's multiplicative hash has
    bits = (bits ^ (bits >> 32)) * -0x61C8864680B583EB
    return ((bits >> 40).float() / 2**23) * 3**0.5  # of 24 bits with a sign: even on [-√3, √3]
