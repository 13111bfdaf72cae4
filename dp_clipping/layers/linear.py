"""Linear layers: y = x Wᵀ + b, so G_i = Σ_t y_it a_itᵀ for W and Σ_t y_it for b.

y are output gradients [B, T, d], a inputs [B, T, p]. The squared norm needs no G:

    ‖G_i‖² = Σ_{t,s} (a_it · a_is)(y_it · y_is)

the inner product of two Gram matrices (Goodfellow 2015, "Efficient per-example gradient
computations", for T = 1; Li et al. 2022, arXiv:2110.05679, "ghost clipping", for sequences).

The rounding of that sum is of the order of ε·S² with S = Σ_t ‖a_t‖‖y_t‖, which exceeds ‖G‖² where
tokens cancel. So every norm comes with an upper bound that includes it, and the bound clips.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.layers.arithmetic import (
    SUM_ROUNDING,
    Weights,
    full_float32,
    squared_norms,
    wide,
    wide_bmm,
    wide_mm,
)
from dp_clipping.layers.handle import Handle, autocast_operands, deliver
from dp_clipping.layout import Layout
from dp_clipping.norms import Norm

# Relative to S², what the rounding of a Gram product is allowed to be.
GRAM_ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-22}
GRAM_ROUNDING_16_BIT = 2.0**-18
# Above these many tokens that allowance, T/2 times as large relative to ‖G‖² where tokens do not
# cancel, would be felt: there G_i is formed instead.
LONGEST_GRAM = {torch.float64: 1 << 30, torch.float32: 256}
LONGEST_GRAM_16_BIT = 2048


def forward(self: torch.nn.Module, x: Tensor) -> Tensor:
    """Of `nn.Linear` and of Hugging Face's `Conv1D`, whose weight is [p, d]."""
    handle: Handle = self._private
    if handle.session is None:
        return type(self).forward(self, x)
    transposed = handle.kind == "conv1d"
    layout, x = handle.batched(x)
    x, weight, bias = autocast_operands(x, self.weight.detach(), _detached(self.bias))
    weight = weight.t() if transposed else weight
    session = handle.session
    bias_slot, bias_sink = handle.receiver("bias")
    arguments = (x, weight, bias, bias_slot, bias_sink)
    if "weight" not in handle.trainable or handle.keeps_dense(x, weight):
        weight_slot, weight_sink = handle.receiver("weight")
        place = (layout.kind, layout.dim, session.batch_size)
        return Dense.apply(*arguments, weight_slot, weight_sink, *place, transposed)
    return Factors.apply(*arguments, session.anchor, handle, layout, transposed)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def batch_tokens(x: Tensor, layout: Layout, batch_size: int) -> Tensor:
    """x in any layout, [.., features] -> [B, T, features]."""
    x = layout.batch_first(x, batch_size)
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


class Dense(torch.autograd.Function):
    """`F.linear`, which in backward computes G [B, d, p] and delivers it.

    Slots are inputs that forward ignores (see `Handle.receiver`). All arguments are tensors, plain
    constants and, outside of compiled regions, sinks. `transposed`: the parameter is [p, d].
    """

    @staticmethod
    def forward(
        ctx, x, weight, bias, bias_slot, bias_sink, weight_slot, weight_sink, kind, dim, batch_size,
        transposed,
    ):  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.layout = (kind, dim, batch_size)
        ctx.wants = (x.requires_grad, weight_slot is not None, bias_slot is not None)
        ctx.sinks = (weight_sink, bias_sink)
        ctx.transposed = transposed
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        kind, dim, batch_size = ctx.layout
        wants_x, wants_weight, wants_bias = ctx.wants
        weight_sink, bias_sink = ctx.sinks
        layout = Layout(kind, dim)
        y = batch_tokens(gy, layout, batch_size)
        gx = gy @ weight if wants_x else None
        gradients = biases = None
        if wants_weight:
            a = batch_tokens(x, layout, batch_size)
            left, right = (a, y) if ctx.transposed else (y, a)
            # In float16 a sum over tokens may exceed the largest number.
            product = wide_bmm if y.dtype == torch.float16 else torch.bmm
            gradients = deliver(weight_sink, product(left.mT, right))
        if wants_bias:
            biases = deliver(bias_sink, y.sum(1, dtype=wide(y.dtype)))
        return gx, None, None, biases, None, gradients, None, None, None, None, None


class Factors(torch.autograd.Function):
    """`F.linear`, which in backward hands its factors to the session and computes no G."""

    @staticmethod
    def forward(ctx, x, weight, bias, bias_slot, bias_sink, anchor, handle, layout, transposed):
        ctx.save_for_backward(x, weight)
        ctx.rest = (handle, handle.session, layout, transposed)
        ctx.wants = (x.requires_grad, bias_slot is not None)
        ctx.bias_sink = bias_sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        handle, session, layout, transposed = ctx.rest
        wants_x, wants_bias = ctx.wants
        y = batch_tokens(gy, layout, session.batch_size)
        gx = gy @ weight if wants_x else None
        a = batch_tokens(x, layout, session.batch_size)
        session.factors(handle.parameter("weight"), LinearFactors(a, y, transposed))
        biases = None
        if wants_bias:
            biases = deliver(ctx.bias_sink, y.sum(1, dtype=wide(y.dtype)))
        return gx, None, None, biases, None, None, None, None, None


class Grams:
    """Gram matrices of the activations last seen: layers that read the same input share one."""

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._gram: Tensor | None = None

    def of(self, a: Tensor) -> Tensor:
        """[B, T, p] -> [B, T, T] in `wide(dtype)`."""
        same = self._of is not None and (
            self._of.data_ptr() == a.data_ptr()
            and self._of.shape == a.shape
            and self._of.stride() == a.stride()
            and self._of._version == a._version
        )
        if not same:
            self._of, self._gram = a, wide_bmm(a, a.mT)
        return self._gram


class LinearFactors:
    """What one use left: a [B, T, p], y [B, T, d]; the parameter is [d, p], transposed [p, d]."""

    def __init__(self, a: Tensor, y: Tensor, transposed: bool):
        self.a, self.y, self.transposed = a, y, transposed
        self.is_scaled = False  # y contains the coefficients
        self._gram_a: Tensor | None = None

    @property
    def accumulates(self) -> bool:
        """Whether G_i is formed, one sample after the other, rather than Gram matrices.

        Where Gram products cost more operations, or their rounding would be felt.
        """
        tokens, inputs, outputs = self.a.shape[1], self.a.shape[2], self.y.shape[2]
        longest = LONGEST_GRAM.get(self.a.dtype, LONGEST_GRAM_16_BIT)
        return tokens > longest or tokens * (inputs + outputs) >= inputs * outputs

    def norm(self, grams: Grams | None = None) -> Norm:
        """‖G_i‖², with the rounding of Gram products and of what `weighted_sum` adds."""
        dtype, tokens = self.a.dtype, self.a.shape[1]
        sum_error = SUM_ROUNDING[wide(dtype)] * max(4.0, tokens**0.5 / 2)
        if self.accumulates:
            squared = torch.cat([squared_norms(gradient) for gradient in self._samples()])
            if dtype == wide(dtype):  # what is summed is what is normed, to the last bit
                return Norm(squared)
            a, y = (torch.linalg.vector_norm(x, dim=2, dtype=wide(dtype)) for x in (self.a, self.y))
            return Norm(squared, (a * y).sum(1), sum_error=sum_error)
        if self._gram_a is None:
            self._gram_a = (grams or Grams()).of(self.a)
        gram_a, gram_y = self._gram_a, wide_bmm(self.y, self.y.mT)
        squared = torch.linalg.vecdot(gram_a, gram_y).sum(1)
        diagonals = gram_a.diagonal(dim1=1, dim2=2) * gram_y.diagonal(dim1=1, dim2=2)
        gram_error = GRAM_ROUNDING.get(dtype, GRAM_ROUNDING_16_BIT)
        return Norm(squared, diagonals.sqrt().sum(1), gram_error, sum_error)

    def _samples(self) -> Iterator[Tensor]:
        """G_i [1, *parameter] in `wide(dtype)`, one after the other."""
        for i in range(len(self.a)):
            yield self.select(slice(i, i + 1)).dense()

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Σ_i c_i G_i in `wide(dtype)`, in the parameter's shape.

        16-bit factors on a GPU are multiplied sample by sample, each product scaled where it is
        accumulated, in float32; scaled ones (see `rescale`) by one product.
        """
        left, right = (self.a, self.y) if self.transposed else (self.y, self.a)
        dtype = wide(left.dtype)
        if self.is_scaled:
            return wide_mm(left.flatten(0, 1).t(), right.flatten(0, 1))
        if left.is_cuda and left.element_size() == 2:
            return self._sum_by_sample(left, right, weights.by_host)
        if self.accumulates and left.dtype == dtype:
            total = left.new_zeros(left.shape[-1], right.shape[-1])
            for gradient, c in zip(self._samples(), weights.by_host, strict=True):
                total.add_(gradient[0], alpha=c)
            return total
        left = left.to(dtype) * weights.values.to(dtype)[:, None, None]
        with full_float32():
            return left.flatten(0, 1).t() @ right.flatten(0, 1).to(dtype)

    def _sum_by_sample(self, left: Tensor, right: Tensor, coefficients: list[float]) -> Tensor:
        shape = (left.shape[-1], right.shape[-1])
        total = torch.zeros(shape, dtype=torch.float32, device=left.device)
        for y, a, c in zip(left, right, coefficients, strict=True):
            total = torch.addmm(total, y.t(), a, out_dtype=torch.float32, alpha=c)
        return total

    def dense(self) -> Tensor:
        """G itself: the plain twin."""
        left, right = (self.a, self.y) if self.transposed else (self.y, self.a)
        return wide_bmm(left.mT, right)

    def select(self, samples: Tensor | slice) -> "LinearFactors":
        return LinearFactors(self.a[samples], self.y[samples], self.transposed)
