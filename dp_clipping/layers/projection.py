"""y = x Wᵀ + b with a private backward: `nn.Linear`, or a part of another layer.

Backward leaves the output gradients y [B, T, d] and the inputs a [B, T, p] to the private step,
which takes norms and sums of G_i = Σ_t y_it a_itᵀ and of Σ_t y_it from them. `LinearFactors` does
so in PyTorch. The squared norm needs no G:

    ‖G_i‖² = Σ_{t,s} (a_it · a_is)(y_it · y_is)

the inner product of two Gram matrices (Goodfellow 2015, "Efficient per-example gradient
computations", for T = 1; Li et al. 2022, arXiv:2110.05679, "ghost clipping", for sequences).

Its rounding is of the order of ε·S² with S = Σ_t ‖a_t‖‖y_t‖, which exceeds ‖G‖² where tokens
cancel, and ε grows with the length of the sums. In 16 bit, where a contribution may be a hundredth
too small, an allowance for it is added to the norm that clips. In float32 none would be small
enough, so there the G of a few samples are formed at a time, normed, and the very same numbers are
summed: both passes form them by the same products of the same samples.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import (
    SUM_ROUNDING,
    Weights,
    accumulation_dtype,
    only,
    product_squares,
    squared_norms,
    weighted_sum,
    wide_product,
)
from dp_clipping.clipping.norms import GRAM_PIECE, GRAM_ROUNDING, UNDERFLOW, Norm
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, Site
from dp_clipping.layers.recorder import LINEAR
from dp_clipping.planning.cost_model import LONGEST_GRAM

PIECE_ELEMENTS = 1 << 20  # of the G that are formed at a time, unless one sample's has more


def project(
    handle: LayerState,
    x: Tensor,
    layout: Layout,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str],
) -> Tensor:
    """Returns y = x Wᵀ + b, one use of W and b in a layer that calls them by these names."""
    site = handle.site(Linear, x, layout, names)
    return site.use(handle.private_step, x, weight, bias)


def gradients_of(left: Tensor, right: Tensor) -> Tensor:
    """Returns G_i = left_iᵀ right_i."""
    # In float16 a sum over tokens may exceed the largest number.
    multiply = wide_product if left.dtype == torch.float16 else torch.bmm
    return multiply(left.mT, right)


def precision_of(site: Site) -> str:
    """Returns PyTorch's setting for products of float32 on a GPU: "tf32", "ieee" or "none"."""
    backend: Any = torch.backends.cudnn.rnn if site.is_recurrent else torch.backends.cuda.matmul
    return backend.fp32_precision


def _as_recurrent(site: Site, multiply: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Returns a product in the precision of recurrent layers."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision_of(site)
    try:
        return multiply(*operands)
    finally:
        matmul.fp32_precision = before


class Linear(torch.autograd.Function):
    """Runs `F.linear`; its backward leaves inputs and output gradients, and computes no G."""

    @staticmethod
    def forward(ctx, x, weight, bias, trigger, _, rest):
        site, private_step, _ = ctx.rest = rest
        if site.cast is not None:
            x, weight = x.to(site.cast), weight.to(site.cast)
            bias = None if bias is None else bias.to(site.cast)
        if site.transposed:
            weight = weight.t()
        if site.planned is not None:
            private_step.plans.calls.append((site.planned, x.shape, x.dtype, weight.shape[0]))
        ctx.to_save = x, weight  # what `save_for_backward` sets, which is a function in Python
        # No view, as it can be with a bias: autograd refuses changes of it in place.
        if site.is_recurrent:
            return _as_recurrent(site, F.linear, x, weight, bias).data
        return F.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        site, private_step, _ = ctx.rest
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        gx = None
        if ctx.needs_input_grad[0]:  # before a shard of the weight may be freed
            gx = _as_recurrent(site, torch.matmul, gy, weight) if site.is_recurrent else gy @ weight
        if site.records:
            private_step.take(LINEAR, site.records, site, (gy, x))
        return gx, None, None, None, None, None


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Returns left rightᵀ [B, T, S] of tokens [B, T, p] and [B, S, p].

    It is in float32, by short chains, of two that are on a GPU and in one 16-bit dtype; of others
    in float64.
    """
    if not (left.is_cuda and left.dtype == right.dtype and left.element_size() == 2):
        return torch.bmm(left.double(), right.double().mT)
    total = None
    for one, other in zip(left.split(GRAM_PIECE, 2), right.split(GRAM_PIECE, 2), strict=True):
        if total is None:
            total = torch.bmm(one, other.mT, out_dtype=torch.float32)
        else:
            total = torch.baddbmm(total, one, other.mT, out_dtype=torch.float32)
    return total


def _token_norms(gram: Tensor, x: Tensor) -> Tensor:
    """Returns ‖x_it‖ [B, T] from Gram matrices, plus what they may lose: see norms.py."""
    lost = (x.shape[2] * torch.finfo(gram.dtype).tiny) ** 0.5 * UNDERFLOW
    return gram.diagonal(dim1=1, dim2=2).sqrt() + lost


class LinearFactors:
    """Factors of one use: a [B, T, p], y [B, T, d]; the parameter is [d, p], transposed [p, d].

    Attributes:
        is_one_token: G_i = y_i a_iᵀ: nothing cancels, and all samples are summed at once.
        accumulates: G_i is formed, a few samples at a time, rather than Gram matrices: in float32,
            where Gram products cost more operations, or where their rounding would be felt.
    """

    held: Any = attrgetter("a", "y")

    def __init__(self, a: Tensor, y: Tensor, transposed: bool):
        self.a, self.y, self.transposed = a, y, transposed
        tokens, inputs, outputs = a.shape[1], a.shape[2], y.shape[2]
        self.is_16_bit, self.is_one_token = y.element_size() == 2, tokens == 1
        longest = LONGEST_GRAM if self.is_16_bit else 0
        is_long = tokens > longest or tokens * (inputs + outputs) >= inputs * outputs
        self.accumulates = is_long and not self.is_one_token
        self._each = max(1, PIECE_ELEMENTS // max(1, inputs * outputs))
        self._everything = slice(0, a.shape[0])
        self._is_one_piece = self.accumulates and a.shape[0] <= self._each

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """Returns left and right [B, T, ..]: G_i = left_iᵀ right_i has the parameter's shape."""
        return (self.a, self.y) if self.transposed else (self.y, self.a)

    def norm(self) -> Norm:
        """Returns ‖G_i‖², with the rounding of Gram products and of what `weighted_sum` adds."""
        # With `accumulates`, what is summed is what is normed, to the last bit.
        if self._is_one_piece:
            return Norm(squared_norms(self.gradients(self._everything)))
        if self.accumulates:
            return Norm(torch.cat([squared_norms(gradients) for _, gradients in self._pieces()]))
        if self.is_one_token:
            return Norm(product_squares(self.y[:, 0], self.a[:, 0]))
        gram_a, gram_y = inner_products(self.a, self.a), inner_products(self.y, self.y)
        squared = (gram_a * gram_y).sum((1, 2), dtype=torch.float64)
        for each in (gram_a, gram_y):  # a factor whose square is infinite: see `product_squares`
            is_large = each.diagonal(dim1=1, dim2=2).amax(1) > torch.finfo(torch.float32).max
            squared = torch.where(is_large, torch.inf, squared)
        scale = (_token_norms(gram_a, self.a) * _token_norms(gram_y, self.y)).sum(1)
        dtype = accumulation_dtype(self.y.dtype)
        sum_error = self.a.shape[1] * SUM_ROUNDING[dtype]
        return Norm(squared.to(dtype), scale.to(dtype), GRAM_ROUNDING, sum_error)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields samples and their G [n, *parameter] in `accumulation_dtype(dtype)`.

        Each call forms the same bits.
        """
        each = self._each
        for first in range(0, max(1, len(self.a)), each):
            part = slice(first, first + each)
            yield part, self.gradients(part)

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Returns Σ_i c_i G_i in `accumulation_dtype(dtype)`, in the parameter's shape.

        16-bit factors of several tokens on a GPU are multiplied sample by sample, each product
        scaled where it is accumulated, in float32: rounded before, tokens that cancel could exceed
        the threshold.
        """
        if self._is_one_piece:
            return weighted_sum(weights, self.gradients(self._everything))
        if self.accumulates:
            pieces = self._pieces()
            sums = (weighted_sum(weights.only(part), gradients) for part, gradients in pieces)
            return reduce(Tensor.add_, sums)
        left, right = self.operands
        dtype = accumulation_dtype(left.dtype)
        if left.is_cuda and self.is_16_bit and not self.is_one_token:
            return self._sum_by_sample(left, right, weights.by_host)
        left = left.to(dtype) * weights.of_dtype(dtype)[:, None, None]
        return wide_product(left.flatten(0, 1).t(), right.flatten(0, 1).to(dtype))

    def _sum_by_sample(self, left: Tensor, right: Tensor, coefficients: list[float]) -> Tensor:
        shape = (left.shape[-1], right.shape[-1])
        total = torch.zeros(shape, dtype=torch.float32, device=left.device)
        for y, a, c in zip(left, right, coefficients, strict=True):
            total = torch.addmm(total, y.t(), a, out_dtype=torch.float32, alpha=c)
        return total

    def dense(self) -> Tensor:
        """Returns G itself: the reference implementation."""
        return self.gradients(self._everything)

    def gradients(self, part: slice) -> Tensor:
        """Returns G of some samples."""
        left, right = self.operands
        return wide_product(left[part].mT, right[part])

    def only(self, good: Tensor) -> "LinearFactors":
        """Returns zeros for the samples that are not `good` [B]."""
        return LinearFactors(only(self.a, good), only(self.y, good), self.transposed)
