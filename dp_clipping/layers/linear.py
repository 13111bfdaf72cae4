"""Linear layers: y = x Wᵀ + b, so G_i = Σ_t y_it a_itᵀ for W and Σ_t y_it for b.

y are output gradients [B, T, d], a inputs [B, T, p]. The squared norm needs no G:

    ‖G_i‖² = Σ_{t,s} (a_it · a_is)(y_it · y_is)

the inner product of two Gram matrices (Goodfellow 2015, "Efficient per-example gradient
computations", for T = 1; Li et al. 2022, arXiv:2110.05679, "ghost clipping", for sequences).

Its rounding is of the order of ε·S² with S = Σ_t ‖a_t‖‖y_t‖, which exceeds ‖G‖² where tokens
cancel, and ε grows with the length of the sums. In 16 bit, where a contribution may be a hundredth
too small, an allowance for it is added to the norm that clips. In float32 none would be small
enough, so there one sample's G is formed at a time, normed, and the very same numbers are summed.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.norms import UNDERFLOW, Norm
from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.layers import linear_compiled, tensor_parallel
from dp_clipping.layers.accumulation import (
    SUM_ROUNDING,
    Weights,
    accumulation_dtype,
    full_float32,
    product_squares,
    squared_norms,
    wide_bmm,
    wide_mm,
)
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, autocast_operands, deliver
from dp_clipping.planning.cost_model import LONGEST_GRAM
from dp_clipping.torch_compat import version_of

# Relative to S², what the rounding of two 16-bit Gram matrices and of their product may be: chains
# of GRAM_PIECE products, 16 of them at a time in a matrix unit, which cuts off and does not round.
GRAM_ROUNDING = 2.0**-16
GRAM_PIECE = 512


def forward(self: torch.nn.Module, x: Tensor) -> Tensor:
    """Of `nn.Linear` and of Hugging Face's `Conv1D`, whose weight is [p, d]."""
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, x)
    weight, bias, transposed = self.weight, self.bias, handle.kind == "conv1d"
    if is_sharded(weight):
        call = tensor_parallel.linear(handle, x, weight, bias, transposed)
        return call.leave(_run(handle, call.x, call.weight, call.bias, transposed))
    return _run(handle, tensor_parallel.plain(handle, x), weight, bias, transposed)


def _run(
    handle: LayerState, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    layout, x = handle.batched(x)
    bias = None if bias is None else bias.detach()
    x, weight, bias = autocast_operands(x, weight.detach(), bias)
    weight = weight.t() if transposed else weight
    if linear_compiled.serves(handle):
        return linear_compiled.run(handle, x, weight, bias, layout, transposed)
    private_step = handle.private_step
    bias_slot, bias_sink = handle.gradient_target("bias")
    arguments = (x, weight, bias, bias_slot, bias_sink)
    if "weight" not in handle.trainable or handle.keeps_dense(x, weight):
        weight_slot, weight_sink = handle.gradient_target("weight")
        place = (layout.kind, layout.dim, private_step.batch_size)
        return Dense.apply(*arguments, weight_slot, weight_sink, *place, transposed)
    parameter = handle.parameter("weight")
    private_step.will_use(parameter, x, weight.shape[0])
    trigger = private_step.trigger_of(parameter)
    return Factors.apply(
        x, weight, bias, bias_slot, trigger, (handle, layout, transposed, bias_sink)
    )


class Dense(torch.autograd.Function):
    """`F.linear`, which in backward computes G [B, d, p] and delivers it.

    Slots are inputs that forward ignores (see `Handle.gradient_target`). All arguments are tensors,
    plain constants and, outside of compiled regions, sinks. `transposed`: the parameter is [p, d].
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
        gy = tensor_parallel.settled(gy)
        kind, dim, batch_size = ctx.layout
        wants_x, wants_weight, wants_bias = ctx.wants
        weight_sink, bias_sink = ctx.sinks
        layout = Layout(kind, dim)
        y = layout.batch_tokens(gy, batch_size)
        gx = gy @ weight if wants_x else None
        gradients = biases = None
        if wants_weight:
            a = layout.batch_tokens(x, batch_size)
            left, right = (a, y) if ctx.transposed else (y, a)
            # In float16 a sum over tokens may exceed the largest number.
            product = wide_bmm if y.dtype == torch.float16 else torch.bmm
            gradients = deliver(weight_sink, product(left.mT, right))
        if wants_bias:
            biases = deliver(bias_sink, y.sum(1, dtype=accumulation_dtype(y.dtype)))
        return gx, None, None, biases, None, gradients, None, None, None, None, None


class Factors(torch.autograd.Function):
    """`F.linear`, which in backward hands its factors to the private step and computes no G."""

    @staticmethod
    def forward(ctx, x, weight, bias, bias_slot, trigger, rest):
        ctx.save_for_backward(x, weight)
        ctx.rest = (rest[0].private_step, *rest)
        ctx.wants = (x.requires_grad, bias_slot is not None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        gy = tensor_parallel.settled(gy)
        private_step, handle, layout, transposed, bias_sink = ctx.rest
        wants_x, wants_bias = ctx.wants
        y = layout.batch_tokens(gy, private_step.batch_size)
        gx = gy @ weight if wants_x else None
        a = layout.batch_tokens(x, private_step.batch_size)
        private_step.factors(handle.parameter("weight"), LinearFactors(a, y, transposed))
        biases = None
        if wants_bias:
            biases = deliver(bias_sink, y.sum(1, dtype=accumulation_dtype(y.dtype)))
        return gx, None, None, biases, None, None


class Grams:
    """Gram matrices of the activations last seen: layers that read the same input share one."""

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._gram: Tensor | None = None

    def of(self, a: Tensor) -> Tensor:
        """[B, T, p] -> [B, T, T] in `accumulation_dtype(dtype)`."""
        same = self._of is not None and (
            self._of.data_ptr() == a.data_ptr()
            and self._of.shape == a.shape
            and self._of.stride() == a.stride()
            and version_of(self._of) == version_of(a)
        )
        if not same:
            self._of, self._gram = a, gram(a)
        return self._gram


def gram(x: Tensor) -> Tensor:
    """x xᵀ of 16-bit x [B, T, p]: [B, T, T], in float32 by short chains on a GPU, else float64."""
    if not x.is_cuda:
        x = x.double()
        return torch.bmm(x, x.mT)
    total = None
    for piece in x.split(GRAM_PIECE, dim=2):
        if total is None:
            total = torch.bmm(piece, piece.mT, out_dtype=torch.float32)
        else:
            total = torch.baddbmm(total, piece, piece.mT, out_dtype=torch.float32)
    return total


def _token_norms(gram: Tensor, x: Tensor) -> Tensor:
    """‖x_it‖ [B, T] from Gram matrices, plus what they may have lost of it: see norms.py."""
    lost = (x.shape[2] * torch.finfo(gram.dtype).tiny) ** 0.5 * UNDERFLOW
    return gram.diagonal(dim1=1, dim2=2).sqrt() + lost


class LinearFactors:
    """What one use left: a [B, T, p], y [B, T, d]; the parameter is [d, p], transposed [p, d]."""

    def __init__(self, a: Tensor, y: Tensor, transposed: bool):
        self.a, self.y, self.transposed = a, y, transposed
        self.is_scaled = False  # y contains the coefficients
        self._gram_a: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """left and right [B, T, ..], with G_i = left_iᵀ right_i in the parameter's shape."""
        return (self.a, self.y) if self.transposed else (self.y, self.a)

    @property
    def bytes(self) -> int:
        return self.a.nbytes + self.y.nbytes

    @property
    def is_16_bit(self) -> bool:
        return self.y.element_size() == 2

    @property
    def accumulates(self) -> bool:
        """Whether G_i is formed, one sample after the other, rather than Gram matrices.

        In float32, where Gram products cost more operations, or where their rounding would be felt.
        """
        tokens, inputs, outputs = self.a.shape[1], self.a.shape[2], self.y.shape[2]
        if tokens == 1:
            return False
        longest = LONGEST_GRAM if self.is_16_bit else 0
        return tokens > longest or tokens * (inputs + outputs) >= inputs * outputs

    def norm(self, grams: Grams | None = None) -> Norm:
        """‖G_i‖², with the rounding of Gram products and of what `weighted_sum` adds."""
        if self.accumulates:  # what is summed is what is normed, to the last bit
            return Norm(torch.cat([squared_norms(gradient) for gradient in self._samples()]))
        if self.a.shape[1] == 1:  # one token cannot cancel
            return Norm(product_squares(self.y[:, 0], self.a[:, 0]))
        if self._gram_a is None:
            self._gram_a = (grams or Grams()).of(self.a)
        gram_a, gram_y = self._gram_a, gram(self.y)
        squared = (gram_a * gram_y).sum((1, 2), dtype=torch.float64)
        for each in (gram_a, gram_y):  # a factor whose square is infinite: see `product_squares`
            is_large = each.diagonal(dim1=1, dim2=2).amax(1) > torch.finfo(torch.float32).max
            squared = torch.where(is_large, torch.inf, squared)
        scale = (_token_norms(gram_a, self.a) * _token_norms(gram_y, self.y)).sum(1)
        dtype = accumulation_dtype(self.y.dtype)
        sum_error = self.a.shape[1] * SUM_ROUNDING[dtype]
        return Norm(squared.to(dtype), scale.to(dtype), GRAM_ROUNDING, sum_error)

    def _samples(self) -> Iterator[Tensor]:
        """G_i [1, *parameter] in `accumulation_dtype(dtype)`, one after the other."""
        for i in range(len(self.a)):
            yield self.select(slice(i, i + 1)).dense()

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Σ_i c_i G_i in `accumulation_dtype(dtype)`, in the parameter's shape.

        16-bit factors on a GPU are multiplied sample by sample, each product scaled where it is
        accumulated, in float32; scaled ones (see `rescale`) by one product.
        """
        left, right = self.operands
        dtype = accumulation_dtype(left.dtype)
        if self.is_scaled:
            return wide_mm(left.flatten(0, 1).t(), right.flatten(0, 1))
        if self.accumulates:
            total = left.new_zeros(left.shape[-1], right.shape[-1], dtype=dtype)
            for gradient, c in zip(self._samples(), weights.by_host, strict=True):
                total.add_(gradient[0], alpha=c)
            return total
        if left.is_cuda and self.is_16_bit:
            return self._sum_by_sample(left, right, weights.by_host)
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
        """G itself: the reference implementation."""
        left, right = self.operands
        return wide_bmm(left.mT, right)

    def select(self, samples: Tensor | slice) -> "LinearFactors":
        return LinearFactors(self.a[samples], self.y[samples], self.transposed)
