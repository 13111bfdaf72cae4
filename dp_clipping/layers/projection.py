"""y = x Wᵀ + b with a private backward: `nn.Linear`, or a part of another layer.

Backward delivers G_i = Σ_t y_it a_itᵀ to the private step (`Dense`). Or it delivers the output
gradients y and the inputs a, from which the step takes norms and sums (`Factors`, see
`linear_factors`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype, wide_bmm
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, autocast_operands, deliver, run
from dp_clipping.layers.linear_factors import LinearFactors


def project(
    handle: LayerState,
    x: Tensor,
    layout: Layout,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool = False,
    names: tuple[str, str] = ("weight", "bias"),
) -> Tensor:
    """Returns y = x Wᵀ + b, one use of W and b in a layer that calls them by these names."""
    x, weight, bias = operands(x, weight, bias, transposed)
    private_step = handle.private_step
    weight_name, bias_name = names
    bias_slot, bias_target = handle.gradient_target(bias_name)
    if weight_name not in handle.trainable or handle.keeps_dense(x, weight, weight_name):
        weight_slot, weight_target = handle.gradient_target(weight_name)
        place = (layout.kind, layout.dim, private_step.batch_size)
        rest = (weight_target, bias_target, *place, transposed)
        return run(handle, Dense, x, weight, bias, weight_slot, bias_slot, rest)
    parameter = handle.parameter(weight_name)
    private_step.plans.will_use(parameter, x, weight.shape[0])
    trigger, take = handle.factor_target(weight_name)
    rest = (weight, bias, private_step.batch_size, take, layout, transposed, bias_target)
    return run(handle, Factors, x, bias_slot, trigger, rest)


def operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns x, W [d, p] and b, detached, as autocast would make them."""
    bias = None if bias is None else bias.detach()
    x, weight, bias = autocast_operands(x, weight.detach(), bias)
    return x, weight.t() if transposed else weight, bias


def weight_use(
    handle: LayerState, name: str, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Callable[[Tensor, Tensor], Tensor | None] | None]:
    """Announces y = x Wᵀ to the private step, for a function that computes it itself.

    Args:
        x: [.., p], of which only shape and dtype count.

    Returns:
        An input for that function, and a function for its backward. This one takes inputs [B, T, p]
        and output gradients [B, T, d], and returns the gradient of that input. (None, None) if W is
        frozen.
    """
    if name not in handle.trainable:
        return None, None
    if handle.keeps_dense(x, weight, name):
        slot, target = handle.gradient_target(name)
        return slot, lambda a, y: deliver(target, gradients_of(y, a))
    private_step, parameter = handle.private_step, handle.parameter(name)
    private_step.plans.will_use(parameter, x, weight.shape[0])
    trigger, take = handle.factor_target(name)
    return trigger, lambda a, y: take(LinearFactors(a, y, False))


def bias_use(
    handle: LayerState, name: str
) -> tuple[Tensor | None, Callable[[Tensor], Tensor | None] | None]:
    """Returns the same for the b of y = x Wᵀ + b, called with output gradients [B, T, d]."""
    slot, target = handle.gradient_target(name)
    if slot is None:
        return None, None
    return slot, lambda y: deliver(target, y.sum(1, dtype=accumulation_dtype(y.dtype)))


def gradients_of(left: Tensor, right: Tensor) -> Tensor:
    """Returns G_i = left_iᵀ right_i."""
    # In float16 a sum over tokens may exceed the largest number.
    multiply = wide_bmm if left.dtype == torch.float16 else torch.bmm
    return multiply(left.mT, right)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `F.linear` as a tensor that is not a view, as it can be with a bias.

    Autograd refuses in-place changes of a view that a custom function has returned.
    """
    return F.linear(x, weight, bias).data


class Dense(torch.autograd.Function):
    """Runs `F.linear`; its backward computes and delivers G [B, d, p].

    Slots are inputs that forward ignores (see `LayerState.gradient_target`). `rest` has plain
    constants and, outside of compiled regions, targets: PyTorch looks at each argument in Python,
    so there are few. `transposed`: the parameter is [p, d].
    """

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        ctx.save_for_backward(x, weight)
        ctx.wants = (x.requires_grad, weight_slot is not None, bias_slot is not None)
        ctx.rest = rest
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        gy = tensor_parallel.arrived(gy)
        wants_x, wants_weight, wants_bias = ctx.wants
        weight_target, bias_target, kind, dim, batch_size, transposed = ctx.rest
        layout = Layout(kind, dim)
        y = layout.batch_tokens(gy, batch_size)
        gx = gy @ weight if wants_x else None
        gradients = biases = None
        if wants_weight:
            a = layout.batch_tokens(x, batch_size)
            left, right = (a, y) if transposed else (y, a)
            gradients = deliver(weight_target, gradients_of(left, right))
        if wants_bias:
            biases = deliver(bias_target, y.sum(1, dtype=accumulation_dtype(y.dtype)))
        return gx, None, None, gradients, biases, None


class Factors(torch.autograd.Function):
    """Runs `F.linear`; its backward delivers factors to the private step and computes no G."""

    @staticmethod
    def forward(ctx, x, bias_slot, trigger, rest):
        weight, bias, *ctx.rest = rest
        ctx.save_for_backward(x, weight)
        ctx.wants = (x.requires_grad, bias_slot is not None)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        gy = tensor_parallel.arrived(gy)
        batch_size, take, layout, transposed, bias_target = ctx.rest
        wants_x, wants_bias = ctx.wants
        y = layout.batch_tokens(gy, batch_size)
        gx = gy @ weight if wants_x else None
        a = layout.batch_tokens(x, batch_size)
        take(LinearFactors(a, y, transposed))
        biases = None
        if wants_bias:
            biases = deliver(bias_target, y.sum(1, dtype=accumulation_dtype(y.dtype)))
        return gx, biases, None, None
