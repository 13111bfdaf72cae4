"""RMSNorm and LayerNorm: y = x̂ · w + b, so G_i = Σ_t y_it · x̂_it for w and Σ_t y_it for b.

x̂ is the normalised input. PyTorch's own backward computes the input's gradient, and
only that; the weights' gradients are one elementwise product and one sum over a sample's
tokens (Zhang and Sennrich 2019 for RMSNorm, Ba et al. 2016 for LayerNorm).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.kernels.norm_layer_gradients import Normalized, norm_layer_gradients_plain
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import FIRST, LayerState, Site, deliver, run
from dp_clipping.layers.recorder import NORMALIZED, Recorder
from dp_clipping.torch_compat import (
    apply_directly,
    fused_rms_norm,
    fused_rms_norm_backward,
    transforms_run,
)

LOW_PRECISION = (torch.float16, torch.bfloat16)
# RMS norms that other libraries define (`capture.rms_norms`). Input and weight -> what scales x̂,
# the dtype that x̂ is rounded to before (None: none), and that of the output (None: the product's).
COPIES: dict[str, Callable[[Tensor, Tensor], tuple]] = {
    "llama_rms_norm": lambda x, w: (w, x.dtype, None),
    "t5_rms_norm": lambda x, w: (w, w.dtype if w.dtype in LOW_PRECISION else None, None),
    "olmo_rms_norm": lambda x, w: (w, None, x.dtype),
    "gemma_rms_norm": lambda x, w: (1.0 + w.float(), None, x.dtype),
}


def forward(self: nn.RMSNorm | nn.LayerNorm, x: Tensor) -> Tensor:
    handle: LayerState = self._private
    private_step = handle.private_step
    if private_step is None:
        return type(self).forward(self, x)
    if (site := handle.site_of(x)) is not None:
        own = self._parameters
        weight, bias = own["weight"].detach(), own.get("bias")
        return _run_site(self, private_step, site, x, weight, bias)
    weight, bias = self.weight, getattr(self, "bias", None)
    if is_sharded(weight):
        call = tensor_parallel.norm(handle, x, weight, bias)
        return call.leave(_run(self, handle, call.x, call.weight, call.bias))
    return _run(self, handle, tensor_parallel.plain(handle, x), weight, bias)


def _run(
    self: nn.Module, handle: LayerState, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    layout, x = handle.batched(x)
    shape, weight = list(weight.shape), weight.detach()
    copy = handle.kind if handle.kind in COPIES else None
    if copy and x.shape[-1:] != weight.shape:
        raise ValueError(
            f"{handle.name or 'the network'} ({type(self).__name__}) has a weight of shape "
            f"{shape} for inputs of {x.shape[-1]} features, and a weight that is broadcast has "
            f"no per-sample gradients here: build it with {x.shape[-1]} features"
        )
    with_eps = handle.kind in ("rms_norm", "gemma_rms_norm", "layer_norm")
    options = (handle.kind, shape, "eps" if with_eps else "variance_epsilon", copy)
    private_step = handle.private_step
    is_traced = private_step.is_compiled and torch.compiler.is_compiling()
    if not (handle.always_dense or is_traced or private_step.policy.dense_always):
        site = handle.keep_site(x, layout, options)
        return _run_site(self, private_step, site, x, weight, bias)
    weight_slot, weight_target = handle.gradient_target("weight")
    bias_slot, bias_target = handle.gradient_target("bias")
    bias = None if bias is None else bias.detach()
    place = (layout.kind, layout.dim, private_step.batch_size)
    rest = (getattr(self, options[2]), options, None, weight_target, bias_target, *place)
    function = LayerNorm if handle.kind == "layer_norm" else RMSNorm
    return run(handle, function, x, weight, bias, weight_slot, bias_slot, rest)


def _run_site(
    self: nn.Module, private_step: Recorder, site: Site, x: Tensor, weight: Tensor,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    options = site.options
    bias = None if bias is None else bias.detach()
    rest = (getattr(self, options[2]), options, (site, private_step))
    trigger = site.records[0].trigger if site.records else None
    if transforms_run():
        function = LayerNorm if options[0] == "layer_norm" else RMSNorm
        return function.apply(x, weight, bias, trigger, None, rest)
    function = _run_layer_norm if options[0] == "layer_norm" else _run_rms_norm
    return function(x, weight, bias, trigger, None, rest)


def by_token(x: Tensor, layout: Layout, batch_size: int, dims: int) -> Tensor:
    """Returns x [.., *shape], `dims` dimensions, in any layout as [B, T, features]."""
    if layout.kind != "dimension" or layout.dim:
        x = layout.batch_first(x, batch_size)
    if x.ndim == 3 and dims == 1:
        return x
    return x.reshape(batch_size, -1, x.shape[x.ndim - dims :].numel())


def _leave(ctx, operands: Sequence[Tensor], with_bias: bool) -> tuple[Tensor | None, Any]:
    """Leaves a normalisation's operands to the step, or returns the gradients of its slots.

    Args:
        operands: output gradient, input, reciprocal standard deviation and, of LayerNorm, mean, as
            the layer has them.
    """
    leave, shape, rest = ctx.leave
    if leave is not None:
        site, private_step = leave
        layout, batch_size = site.layout or FIRST, private_step.batch_size
    else:
        weight_target, bias_target, kind, dim, batch_size = rest
        layout = Layout(kind, dim)
    y, x, *rows = operands
    if y.ndim != 3 or len(shape) != 1 or layout is not FIRST:
        place = (layout, batch_size, len(shape))
        y, x, *rows = [by_token(t, *place) for t in operands]
    rstd = rows[0].flatten(1)
    mean = rows[1].flatten(1) if len(rows) > 1 else None
    use = Normalized(y, x, rstd, mean, with_bias)
    if leave is not None:
        value = use, (site.weight, site.bias)
        private_step.take(NORMALIZED, site.records, value, (y, x, rstd))
        return None, None
    weight, bias = norm_layer_gradients_plain(use, accumulation_dtype(x.dtype))
    wants_weight, wants_bias = ctx.wants
    weight = deliver(weight_target, weight.view(batch_size, *shape)) if wants_weight else None
    bias = deliver(bias_target, bias.view(batch_size, *shape)) if wants_bias else None
    return weight, bias


class RMSNorm(torch.autograd.Function):
    """Runs `F.rms_norm`, or a copy of it; its backward leaves what its weight's G follows from.

    With slots it returns their gradients, G [B, *shape].

    `rest` has eps, options, and either the site and the private step, or None, the targets of the
    slots and where samples are.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        eps, options, leave = rest[:3]
        shape, copy = options[1], options[3]
        dims = list(range(-len(shape), 0))
        fused = fused_rms_norm() if x.is_cuda else None
        if copy:
            weight, inner, outer = COPIES[copy](x, weight)
            if fused and x.dtype == (inner or torch.float32) != torch.float64:
                normalized, rstd = fused(x, shape, None, eps)
            else:
                wider = x.to(torch.float32)
                rstd = torch.rsqrt(wider.pow(2).mean(-1, keepdim=True) + eps)
                normalized = (x if copy == "t5_rms_norm" else wider) * rstd
            y = weight * normalized.to(inner or normalized.dtype)
            y = y.to(outer or y.dtype)
        elif fused and weight.dtype == x.dtype:
            y, rstd = fused(x, shape, weight, eps)
        else:
            y = F.rms_norm(x, shape, weight, eps)
            eps = (
                torch.finfo(accumulation_dtype(x.dtype)).eps if eps is None else eps
            )  # PyTorch's own default
            rstd = (
                x.to(accumulation_dtype(x.dtype)).square().mean(dims, keepdim=True) + eps
            ).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        ctx.dims, ctx.leave = dims, (leave, shape, rest[3:])
        ctx.wants = weight_slot is not None, False
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight, rstd = ctx.saved_tensors
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        wants_weight, _ = ctx.wants
        gx = gradients = None
        if ctx.needs_input_grad[0]:
            gx = _rms_norm_input_gradient(gy, x, weight, rstd, ctx.leave[1], ctx.dims)
        if wants_weight:
            gradients, _ = _leave(ctx, (gy, x, rstd), False)
        return gx, None, None, gradients, None, None


def _rms_norm_input_gradient(gy, x, weight, rstd, shape, dims) -> Tensor:
    backward = fused_rms_norm_backward() if x.is_cuda else None
    if backward and weight.dtype == x.dtype == gy.dtype:
        return backward(gy, x, shape, rstd, weight, [True, False])[0]
    dtype = accumulation_dtype(x.dtype)
    normalized, scaled = x.to(dtype) * rstd, gy.to(dtype) * weight
    mean = (scaled * normalized).mean(dims, keepdim=True)
    return (rstd * (scaled - normalized * mean)).to(x.dtype)


class LayerNorm(torch.autograd.Function):
    """Runs `F.layer_norm`; its backward leaves what its two G follow from; see `RMSNorm`."""

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        eps, options, leave = rest[:3]
        if x.dtype != weight.dtype:  # under autocast
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        y, mean, rstd = torch.native_layer_norm(x, options[1], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.leave = leave, options[1], rest[3:]
        if leave is None:
            ctx.wants = weight_slot is not None, bias_slot is not None
        else:
            ctx.wants = bool(leave[0].records), leave[0].bias is not None
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        wants_weight, wants_bias = ctx.wants
        gx = weights = biases = None
        if ctx.needs_input_grad[0]:
            gx = _layer_norm_backward(
                gy, x, ctx.leave[1], mean, rstd, weight, bias, [True, False, False]
            )[0]
        if wants_weight or wants_bias:
            weights, biases = _leave(ctx, (gy, x, rstd, mean), wants_bias)
        return gx, None, None, weights, biases, None


_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_run_layer_norm, _run_rms_norm = apply_directly(LayerNorm), apply_directly(RMSNorm)
