"""Products and sums whose rounding is part of the guarantee.

Whatever the dtype of the operands, results are accumulated and returned in float32 (float64 for
float64): matrix units multiply 16-bit operands exactly and add in float32, so nothing is lost that
the operands had.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# Unit roundoff of a sum: what it may differ by, relative to the sum of magnitudes, is a few of it.
SUM_ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
PIECE = 1024  # squares that are added in float32
CHUNK_ELEMENTS = 1 << 24  # of float32 temporaries, where a product must be widened piece by piece


ACCUMULATED = {torch.float64: torch.float64}  # others in float32; see `accumulation_dtype`


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that sums are accumulated in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a stored G: a sum over tokens may exceed float16's largest number."""
    return torch.float32 if dtype == torch.float16 else dtype


WITHIN, PRECISION = nullcontext(), attrgetter("fp32_precision")
_is_full = False  # whether `full_float32` is entered, which reads and writes several settings


def full_float32(layers: bool = False) -> AbstractContextManager[None]:
    """Returns a context that computes float32 products in float32: no TensorFloat-32, no bfloat16.

    With `layers` those of convolutions and recurrent layers too, which PyTorch computes in
    TensorFloat-32 by default.
    """
    return WITHIN if _is_full and not layers else _FullFloat32(layers)


class _FullFloat32:
    def __init__(self, layers: bool):
        self._backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
        self._has_layers, self._was_allowed = layers, False
        if layers:
            cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
            self._backends += [cudnn.conv, cudnn.rnn, mkldnn.conv, mkldnn.rnn]

    def __enter__(self) -> None:
        global _is_full
        self._before, self._outer = list(map(PRECISION, self._backends)), _is_full
        if self._has_layers and _cudnn_allows_tf32():
            self._was_allowed, torch.backends.cudnn.allow_tf32 = True, False
        for backend in self._backends:
            backend.fp32_precision = "ieee"
        _is_full = True

    def __exit__(self, *_: object) -> None:
        global _is_full
        _is_full = self._outer
        if self._was_allowed:
            torch.backends.cudnn.allow_tf32 = True
        for backend, precision in zip(self._backends, self._before, strict=True):
            backend.fp32_precision = precision


def _cudnn_allows_tf32() -> bool:
    """Returns an older setting, which PyTorch refuses to read where newer ones contradict it.

    A network reads it too that enters `torch.backends.cudnn.flags`, as Hugging Face's do for CTC.
    """
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the user's own settings do
        return False


@contextmanager
def network_in_float64(network: nn.Module) -> Iterator[None]:
    """Converts the network's numbers to float64 inside; afterwards they are the same as before."""
    values = (*network.parameters(), *network.buffers())
    tensors = [x for x in values if x.is_floating_point()]
    before = [x.data for x in tensors]
    try:
        for x in tensors:
            x.data = x.data.double()
        yield
    finally:
        for x, data in zip(tensors, before, strict=True):
            x.data = data
        torch.clear_autocast_cache()  # copies of weights in it have lost the way to their gradients


def doubled(x: Tensor) -> Tensor:
    """Returns a tensor of floating-point numbers in float64, another one as it is."""
    return x.double() if x.is_floating_point() else x


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns [m, k] @ [k, n], or [B, m, k] @ [B, k, n], in `accumulation_dtype(dtype)`."""
    multiply = torch.bmm if left.ndim == 3 else torch.mm
    dtype = ACCUMULATED.get(left.dtype, torch.float32)
    if left.dtype == dtype:
        if _is_full:
            return multiply(left, right)
        with full_float32():
            return multiply(left, right)
    if left.is_cuda:
        return multiply(left, right, out_dtype=dtype)
    return multiply(left.to(dtype), right.to(dtype))


def sum_of_pictures(sums: Tensor, batch_size: int) -> Tensor:
    """Returns [B, ..] from [N, ..], N a multiple of B: a sample's pictures are side by side."""
    if sums.shape[0] == batch_size:
        return sums
    return sums.view(batch_size, -1, *sums.shape[1:]).sum(1)


def only(x: Tensor, good: Tensor) -> Tensor:
    """Returns x [B, ...] with zeros for the samples that are not `good` [B]."""
    return x.masked_fill(~good.view(-1, *[1] * (x.dim() - 1)), 0)


def squared_norms(gradients: Tensor) -> Tensor:
    """Returns ‖G_i‖² of G [B, ...], of exactly the rounded values in it.

    The result, [B], is in `accumulation_dtype(dtype)`.

    A float32 sum over millions of squares loses up to some percent where it is made in one chain,
    as on CPUs. So norms of short pieces are taken first, and their squares added in float64.
    Squares of numbers below 1e-19 are lost, which is nothing beside any C that is taken; where the
    result is multiplied with another one take `norms`.
    """
    rows = gradients.reshape(gradients.shape[0], gradients.shape[1:].numel())
    dtype = ACCUMULATED.get(rows.dtype, torch.float32)
    count, numel = rows.shape
    whole = numel - numel % PIECE
    total = rows.new_zeros(count, dtype=torch.float64)
    if count and whole:
        pieces = rows[:, :whole].reshape(count, -1, PIECE)
        total += torch.linalg.vector_norm(pieces, dim=2, dtype=dtype).double().square().sum(1)
    if count and numel > whole:
        rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, dtype=dtype)
        total += rest.double().square()
    return total.to(dtype)


def norms(rows: Tensor) -> Tensor:
    """Returns ‖x_i‖ of x [B, n]: [B] float64, right for every finite x, however small or large."""
    if rows.dtype != torch.float64:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    power = torch.exp2(torch.frexp(largest).exponent.double().clamp(-1000, 1000))
    return torch.linalg.vector_norm(rows / power[:, None], dim=1) * power


def sum_of_one_token(left: Tensor, right: Tensor, c: Tensor) -> Tensor:
    """Returns Σ_i c_i left_iᵀ right_i [d, p] float32, over the samples with c_i > 0.

    Args:
        left, right: [B, 1, d] and [B, 1, p], of any values where c_i is 0.
        c: [B] float32.
    """
    good = c > 0
    scaled, others = only(left[:, 0].float(), good) * c[:, None], only(right[:, 0], good)
    if others.is_cuda and left.dtype == others.dtype == torch.bfloat16:
        low, middle, high = (wide_product(part.t(), others) for part in thirds(scaled))
        return low.add_(middle).add_(high)
    return wide_product(scaled.t(), others.float())


def thirds(x: Tensor) -> list[Tensor]:
    """Returns three bfloat16 tensors whose sum is x, float32, but for what is below 1e-38.

    Matrix units multiply them sixteen times as fast as float32.
    """
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1]
    return parts[::-1]


def product_squares(left: Tensor, right: Tensor) -> Tensor:
    """Returns ‖y_i a_iᵀ‖² = (‖y_i‖‖a_i‖)² of y [B, d], a [B, p]: [B] in `accumulation_dtype`.

    Infinite where a square of one factor is: scaled by a coefficient the other factor may then be
    so small that its rounding makes the product larger.
    """
    dtype = accumulation_dtype(left.dtype)
    factors = torch.stack([norms(left), norms(right)])
    is_large = (factors.square().to(dtype) == torch.inf).any(0)
    return torch.where(is_large, torch.inf, factors.prod(0).square()).to(dtype)


def round_down(coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the largest values of `dtype` that are not above the coefficients (which are ≥ 0)."""
    rounded = coefficients.to(dtype)
    too_large = rounded.to(coefficients.dtype) > coefficients
    below = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(too_large, below, rounded)


class Weights:
    """Coefficients c [B] of one clipping group, in the forms that sums take.

    `values` are float32 (float64) on the device.
    """

    def __init__(self, values: Tensor):
        self.values = values
        self._rounded: dict[torch.dtype, Tensor] = {}
        self._blocks: dict[tuple[torch.dtype, int], tuple[Tensor, float]] = {}

    @cached_property
    def by_host(self) -> list[float]:
        """The same as numbers. The host waits for the device."""
        return self.values.tolist()

    def only(self, samples: slice) -> "Weights":
        """Returns the coefficients of some samples."""
        return Weights(self.values[samples])

    def of_dtype(self, dtype: torch.dtype) -> Tensor:
        """Returns c [B] in the dtype of a sum, rounded down where it is float32 and c is not.

        In a network of several dtypes the norm over all of it, and so c, may be float64.
        """
        if self.values.dtype == dtype:
            return self.values
        if dtype not in self._rounded:
            self._rounded[dtype] = round_down(self.values, dtype)
        return self._rounded[dtype]

    def block(self, dtype: torch.dtype, pieces: int) -> tuple[Tensor, float]:
        """Returns C [g, B·g], its i-th block c_i on the diagonal, rounded down, and a factor.

        The factor is a power of two that brings float16 coefficients, small beside the largest of
        them or not, into that dtype's range; 1 for bfloat16, which has float32's.
        """
        key = (dtype, pieces)
        if key not in self._blocks:
            exponent = 0
            if dtype == torch.float16 and max(self.by_host) > 0:
                exponent = math.frexp(max(self.by_host))[1]
            row = round_down(self.values * 2.0**-exponent, dtype)[None]
            identity = torch.eye(pieces, dtype=dtype, device=row.device)
            self._blocks[key] = (torch.kron(row, identity), 2.0**exponent)
        return self._blocks[key]


def weighted_sum(weights: Weights, gradients: Tensor) -> Tensor:
    """Returns Σ_i c_i G_i in `accumulation_dtype(dtype)`; G [B, *shape].

    On a GPU 16-bit gradients are read once by a matrix product, with coefficients rounded *down* to
    their dtype (by less than 2⁻⁷): a product of two such numbers is exact in float32, so a sample's
    contribution still is at most its coefficient times its norm.
    """
    if not _is_full:
        with full_float32():
            return weighted_sum(weights, gradients)
    shape = gradients.shape[1:]
    rows = gradients.reshape(gradients.shape[0], shape.numel())
    if rows.is_cuda and rows.element_size() == 2 and rows.shape[0]:
        return _sum_by_pieces(weights, rows).view(shape)
    dtype = ACCUMULATED.get(rows.dtype, torch.float32)
    coefficients = weights.values if weights.values.dtype == dtype else weights.of_dtype(dtype)
    if rows.dtype == dtype:
        return (coefficients @ rows).view(shape)
    total = torch.empty(rows.shape[1], dtype=dtype, device=rows.device)
    width = max(1, CHUNK_ELEMENTS // max(1, rows.shape[0]))
    for start in range(0, rows.shape[1], width):
        piece = rows[:, start : start + width].to(dtype)
        torch.mv(piece.t(), coefficients, out=total[start : start + width])
    return total.view(shape)


def _sum_by_pieces(weights: Weights, rows: Tensor) -> Tensor:
    """Returns c @ rows [B, N] as C @ rows' with rows' [B·g, N/g], a view, and C [g, B·g].

    A product with one row has next to nothing for the matrix units to do with the 64 rows that
    they load at a time; cutting each sample into g pieces fills them.
    """
    batch_size, numel = rows.shape
    pieces = max(1, 64 // batch_size)
    while numel % (8 * pieces) and pieces > 1:
        pieces //= 2
    block, factor = weights.block(rows.dtype, pieces)
    total = wide_product(block, rows.view(batch_size * pieces, numel // pieces)).view(-1)
    return total if factor == 1 else total.mul_(factor)


def autocast_of(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast gives operands of a matrix product of x; None: their own."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a matrix product of x, as autocast has it."""
    return autocast_of(x) or x.dtype


def autocast_operands(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Returns the operands as autocast would make them for a matrix product."""
    dtype = autocast_of(x)
    if dtype is None:
        return (x, *parameters)
    return tuple(None if t is None else t.to(dtype) for t in (x, *parameters))
