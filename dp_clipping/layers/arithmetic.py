"""Products and sums whose rounding is part of the guarantee.

Whatever the dtype of the operands, results are accumulated and returned in float32 (float64 for
float64): matrix units multiply 16-bit operands exactly and add in float32, so nothing is lost that
the operands had.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Unit roundoff of a sum: what it may differ by, relative to the sum of magnitudes, is a few of it.
SUM_ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
CHUNK_ELEMENTS = 1 << 24  # of float32 temporaries, where a product must be widened piece by piece


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are accumulated in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def full_float32() -> Iterator[None]:
    """Float32 products inside are float32 products: no TensorFloat-32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def wide_bmm(left: Tensor, right: Tensor) -> Tensor:
    """[B, m, k] @ [B, k, n] -> [B, m, n], accumulated and returned in `wide(dtype)`."""
    dtype = wide(left.dtype)
    if left.dtype == dtype:
        with full_float32():
            return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def wide_mm(left: Tensor, right: Tensor) -> Tensor:
    """[m, k] @ [k, n] -> [m, n], accumulated and returned in `wide(dtype)`."""
    dtype = wide(left.dtype)
    if left.dtype == dtype:
        with full_float32():
            return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left.to(dtype), right.to(dtype))


def squared_norms(gradients: Tensor) -> Tensor:
    """‖G_i‖² of G [B, ...]: [B] in `wide(dtype)`, of exactly the rounded values in G."""
    rows = gradients.reshape(len(gradients), gradients.shape[1:].numel())
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide(rows.dtype)).square()


def round_down(coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest values of `dtype` that are not above the coefficients (which are ≥ 0)."""
    rounded = coefficients.to(dtype)
    too_large = rounded.to(coefficients.dtype) > coefficients
    below = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(too_large, below, rounded)


def weighted_sum(coefficients: Tensor, gradients: Tensor) -> Tensor:
    """Σ_i c_i G_i in `wide(dtype)`; c [B] in that dtype, G [B, *shape].

    On a GPU 16-bit gradients are read once by a matrix product, with coefficients rounded *down* to
    their dtype (by less than 2⁻⁷): a product of two such numbers is exact in float32, so a sample's
    contribution still is at most its coefficient times its norm.
    """
    rows = gradients.reshape(len(gradients), gradients.shape[1:].numel())
    if rows.is_cuda and rows.element_size() == 2 and len(rows):
        total = _sum_by_groups(coefficients, rows)
    else:
        total = _widened_sum(coefficients, rows)
    return total.view(gradients.shape[1:])


def _sum_by_groups(coefficients: Tensor, rows: Tensor) -> Tensor:
    """c @ rows [B, N] as C @ rows' with rows' [B·g, N/g], a view, and C [g, B·g] block by block.

    A product with one row has next to nothing for the matrix units to do with the 64 rows that
    they load at a time; cutting each sample into g pieces fills them. Powers of two bring the
    largest coefficient near 1, so that small ones do not leave the dtype's range.
    """
    batch_size, numel = rows.shape
    pieces = max(1, 64 // batch_size)
    while numel % (8 * pieces) and pieces > 1:
        pieces //= 2
    exponent = torch.frexp(coefficients.max()).exponent
    near_one = torch.ldexp(coefficients, -exponent)
    block = torch.eye(pieces, dtype=rows.dtype, device=rows.device)
    left = torch.kron(round_down(near_one, rows.dtype)[None], block)
    total = wide_mm(left, rows.view(batch_size * pieces, numel // pieces))
    return torch.ldexp(total.view(-1), exponent, out=total.view(-1))


def _widened_sum(coefficients: Tensor, rows: Tensor) -> Tensor:
    dtype = wide(rows.dtype)
    if rows.dtype == dtype:
        with full_float32():
            return coefficients.to(dtype) @ rows
    total = torch.empty(rows.shape[1], dtype=dtype, device=rows.device)
    width = max(1, CHUNK_ELEMENTS // max(1, rows.shape[0]))
    for start in range(0, rows.shape[1], width):
        piece = rows[:, start : start + width].to(dtype)
        with full_float32():
            torch.mv(piece.t(), coefficients.to(dtype), out=total[start : start + width])
    return total
