"""y = x Wᵀ + b with a private backward: `nn.Linear`, or a part of another layer.

Backward leaves the output gradients y and the inputs a to the private step, which takes norms and
sums of G_i = Σ_t y_it a_itᵀ and of Σ_t y_it from them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import wide_product
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, Site
from dp_clipping.layers.recorder import LINEAR


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
            private_step.take(LINEAR, site.records, (gy, x, site), (gy, x))
        return gx, None, None, None, None, None
