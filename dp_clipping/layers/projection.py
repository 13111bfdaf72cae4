"""y = x Wᵀ + b with a private backward: `nn.Linear`, or a part of another layer.

Backward leaves the output gradients y and the inputs a to the private step, which takes norms and
sums of G_i = Σ_t y_it a_itᵀ and of Σ_t y_it from them (`Linear`). A parameter with several uses has
a slot that adds up their G (`Dense`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype, wide_bmm
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, Site, autocast_operands, deliver, run
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.recorder import LINEAR
from dp_clipping.torch_compat import apply_directly, transforms_run


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
    given = x
    x, weight, bias = operands(x, weight, bias, transposed)
    private_step = handle.private_step
    weight_name, bias_name = names
    is_shared = handle.always_dense or handle.joined
    if is_shared or handle.keeps_dense(x, weight, weight_name):
        return _project_by_slots(handle, x, layout, weight, bias, transposed, names)
    if names == ("weight", "bias"):
        site = handle.keep_site(given, layout)
    else:
        own = handle.parameters()
        is_first = layout.kind == "dimension" and not layout.dim
        site = Site(
            own.get(weight_name), own.get(bias_name), None if is_first else layout, transposed
        )
    if site.weight is not None:
        private_step.plans.calls.append((site.weight, x.shape, x.dtype, weight.shape[0]))
    trigger = site.records[0].trigger if site.records else None
    rest = (site, private_step, weight, bias)
    return Linear.apply(x, trigger, rest) if transforms_run() else run_linear(x, trigger, rest)


def _project_by_slots(
    handle: LayerState,
    x: Tensor,
    layout: Layout,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
    names: tuple[str, str],
) -> Tensor:
    """Returns the same where a parameter has several uses, or in code that is being compiled."""
    private_step = handle.private_step
    weight_name, bias_name = names
    bias_slot, bias_target = handle.gradient_target(bias_name)
    place = (layout.kind, layout.dim, private_step.batch_size, transposed)
    if weight_name not in handle.trainable or handle.keeps_dense(x, weight, weight_name):
        weight_slot, weight_target = handle.gradient_target(weight_name)
        rest = (weight_target, bias_target, *place)
        return run(handle, Dense, x, weight, bias, weight_slot, bias_slot, rest)
    private_step.plans.calls.append(
        (handle.parameter(weight_name), x.shape, x.dtype, weight.shape[0])
    )
    trigger, take = handle.factor_target(weight_name)
    target = lambda left, right: take(_factors_of(left, right, transposed))  # noqa: E731
    rest = (_Factors(target), bias_target, *place)
    return run(handle, Dense, x, weight, bias, trigger, bias_slot, rest)


def _factors_of(left: Tensor, right: Tensor, transposed: bool) -> LinearFactors:
    return LinearFactors(left, right, True) if transposed else LinearFactors(right, left, False)


class _Factors:
    """A target of `Dense` that takes the factors of G."""

    def __init__(self, take: Callable[[Tensor, Tensor], None]):
        self.take = take


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
    handle.private_step.plans.calls.append(
        (handle.parameter(name), x.shape, x.dtype, weight.shape[0])
    )
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
    """Runs `F.linear`; its backward computes and delivers G [B, d, p], or its factors.

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
            if isinstance(weight_target, _Factors):
                weight_target.take(left, right)
            else:
                gradients = deliver(weight_target, gradients_of(left, right))
        if wants_bias:
            biases = deliver(bias_target, y.sum(1, dtype=accumulation_dtype(y.dtype)))
        return gx, None, None, gradients, biases, None


class Linear(torch.autograd.Function):
    """Runs `F.linear`; its backward leaves inputs and output gradients, and computes no G."""

    @staticmethod
    def forward(ctx, x, trigger, rest):
        site, private_step, weight, bias = rest
        ctx.rest = site, private_step
        ctx.to_save = x, weight  # what `save_for_backward` sets, which is a function in Python
        return F.linear(x, weight, bias).data  # see `product`

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        site, private_step = ctx.rest
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        gx = gy @ weight if ctx.needs_input_grad[0] else None  # before a shard of it may be freed
        if site.records:
            private_step.take(LINEAR, site.records, (gy, x, site), (gy, x))
        return gx, None, None


run_linear = apply_directly(Linear)
