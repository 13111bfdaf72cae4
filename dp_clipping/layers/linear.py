"""Linear layers: y = x Wᵀ + b, so G_i = Σ_t y_it a_itᵀ for W and Σ_t y_it for b.

`projection` has what one use keeps for its backward.

**In a region that `torch.compile` traces** a layer cannot call the private step. So there the
layer's function (`CompiledLinear`) has three inputs that forward ignores: slots without memory. Its
backward returns as their gradients, depending on the plan,

    gradient, squares, count    G [B, *parameter] with ‖G_i‖² [B] from the kernel that writes it
    y, a, count                 the factors [B, T, d] and [B, T, p] themselves

or G alone, where a weight has several uses, or the arithmetic is plain.

The kernel is one operator that is opaque to the compiler. Autograd adds the gradients of two uses
of a slot, which is right for G only. So each use returns a count of 1 for a slot that many layers
share, and a sum above the number of their weights reveals it. Autograd also sums a gradient down to
the slot's shape where it can be broadcast from it (T = 1), and casts it to the slot's dtype,
silently. So forward compares shapes and dtypes while it is traced, and they are guards of the
compiled function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype, autocast_operands, stored_dtype
from dp_clipping.kernels.gradient import gradient_and_squares
from dp_clipping.kernels.launch.tiles import tile_of
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, forward_of
from dp_clipping.layers.projection import Linear, gradients_of
from dp_clipping.layers.recorder import CHANGED, FACTOR_SLOTS, GRADIENT_SLOTS


def _first_call(self: torch.nn.Module, handle: LayerState, x: Tensor) -> Tensor:
    """Computes `nn.Linear`, or Hugging Face's `Conv1D`, whose weight is [p, d]."""
    transposed = handle.kind == "conv1d"
    call = tensor_parallel.linear(handle, x, self.weight, self.bias, transposed)
    layout, x = handle.batched(call.x)
    if torch.compiler.is_compiling():
        y = _run_compiled(handle, x, call.weight, call.bias, layout, transposed)
    else:
        site = handle.site(Linear, x, layout, transposed=transposed)
        if call.mesh is None:
            handle.keep(call.x, site)
        y = site.use(handle.private_step, x, call.weight, call.bias)
    return call.leave(y)


forward = forward_of("linear", _first_call)


@torch.library.custom_op(
    "dp_clipping::gradient_and_squares",
    mutates_args=(),
    schema="(Tensor left, Tensor right, int? tile_size) -> (Tensor, Tensor)",
)
def _gradient_and_squares(
    left: Tensor, right: Tensor, tile_size: int | None
) -> tuple[Tensor, Tensor]:
    """Returns G_i = left_iᵀ right_i and its squared norms; see `kernels.gradient`."""
    return gradient_and_squares(left, right, tile_of(tile_size, left.dtype))


@_gradient_and_squares.register_fake
def _(left: Tensor, right: Tensor, tile_size: int | None) -> tuple[Tensor, Tensor]:
    shape = (left.shape[0], left.shape[2], right.shape[2])
    gradients = left.new_empty(shape, dtype=stored_dtype(left.dtype))
    return gradients, left.new_empty(shape[0], dtype=torch.float32)


def _run_compiled(
    handle: LayerState,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    transposed: bool,
) -> Tensor:
    bias = None if bias is None else bias.detach()
    x, weight, bias = autocast_operands(x, weight.detach(), bias)
    weight = weight.t() if transposed else weight
    private_step, slots = handle.private_step, handle.slots
    keeps_factors = "y" in slots
    if "count" in slots:
        of_weight = [slots[name] for name in (FACTOR_SLOTS if keeps_factors else GRADIENT_SLOTS)]
        if of_weight[0].dtype != (x.dtype if keeps_factors else stored_dtype(x.dtype)):
            raise ValueError(f"{handle.name} is given another dtype {CHANGED}")
        if keeps_factors and of_weight[1].numel() != x.numel():
            raise ValueError(f"{handle.name} is given another number of tokens {CHANGED}")
    else:  # weights that are used several times, or plain arithmetic
        of_weight = [handle.slot("weight"), None, None]
    place = (layout.kind, layout.dim, private_step.batch_size)
    rest = (place, transposed, keeps_factors, private_step.policy.tile_size)
    return CompiledLinear.apply(x, weight, bias, handle.slot("bias"), *of_weight, rest)


class CompiledLinear(torch.autograd.Function):
    """Runs `F.linear`; its backward returns the gradients of the slots.

    The weight's is `first` alone where `count` is None, and none if it is frozen.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, bias_slot, first, second, count, rest):
        ctx.save_for_backward(x, weight)
        ctx.rest = rest
        ctx.wants = (x.requires_grad, bias_slot is not None, first is not None, count is not None)
        return F.linear(x, weight, bias).data  # no view: see `Linear`

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        wants_x, wants_bias, wants_weight, is_counted = ctx.wants
        (kind, dim, batch_size), transposed, keeps_factors, tile_size = ctx.rest
        layout = Layout(kind, dim)
        y, a = layout.batch_tokens(gy, batch_size), layout.batch_tokens(x, batch_size)
        gx = gy @ weight if wants_x else None
        biases = y.sum(1, dtype=accumulation_dtype(y.dtype)) if wants_bias else None
        left, right = (a, y) if transposed else (y, a)
        first = second = count = None
        if keeps_factors:
            first, second = y, a
        elif is_counted:
            first, second = torch.ops.dp_clipping.gradient_and_squares(left, right, tile_size)
        elif wants_weight:
            first = gradients_of(left, right)
        if is_counted:
            count = torch.ones(1, dtype=torch.float32, device=gy.device)
        return gx, None, None, biases, first, second, count, None
