"""RMSNorm and LayerNorm: y = x̂ · w + b, so G_i = Σ_t y_it · x̂_it for w and Σ_t y_it for b.

x̂ is the normalised input. PyTorch's own backward computes the input's gradient, and
only that; the weights' gradients are one elementwise product and one sum over a sample's
tokens (Zhang and Sennrich 2019 for RMSNorm, Ba et al. 2016 for LayerNorm).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.kernels.launch.tiles import available
from dp_clipping.kernels.norm_layer_gradients import Normalized, norm_layer_gradients
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, deliver, run
from dp_clipping.torch_compat import fused_rms_norm, fused_rms_norm_backward

LOW_PRECISION = (torch.float16, torch.bfloat16)
# RMS norms that other libraries define (`capture.rms_norms`). Input and weight -> what scales x̂,
# the dtype that x̂ is rounded to before (None: none), and that of the output (None: the product's).
COPIES: dict[str, Callable[[Tensor, Tensor], tuple]] = {
    "llama_rms_norm": lambda x, w: (w, x.dtype, None),
    "t5_rms_norm": lambda x, w: (w, w.dtype if w.dtype in LOW_PRECISION else None, None),
    "olmo_rms_norm": lambda x, w: (w, None, x.dtype),
    "gemma_rms_norm": lambda x, w: (1.0 + w.float(), None, x.dtype),
}
NOW, LATER = "now", "later"  # later: the private step launches it, for many layers together


def forward(self: nn.RMSNorm | nn.LayerNorm, x: Tensor) -> Tensor:
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, x)
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
    when = _when(handle, x, shape)
    place = (layout.kind, layout.dim, handle.private_step.batch_size, when)
    copy = handle.kind if handle.kind in COPIES else None
    if copy or handle.kind == "rms_norm":
        with_eps = handle.kind in ("rms_norm", "gemma_rms_norm")
        eps = self.eps if with_eps else self.variance_epsilon
        if copy and x.shape[-1:] != weight.shape:
            raise ValueError(
                f"{handle.name or 'the network'} ({type(self).__name__}) has a weight of shape "
                f"{shape} for inputs of {x.shape[-1]} features, and a weight that is broadcast has "
                f"no per-sample gradients here: build it with {x.shape[-1]} features"
            )
        if when == LATER:
            slot = handle.trigger("weight")
            target = partial(handle.private_step.normalized, handle.parameter("weight"), None)
        else:
            slot, target = handle.gradient_target("weight")
        return run(handle, RMSNorm, x, weight, slot, (target, shape, eps, *place, copy))
    bias = None if bias is None else bias.detach()
    if when == LATER:
        weight_slot, bias_slot = handle.trigger("weight"), handle.trigger("bias")
        own = handle.parameters()
        take = partial(handle.private_step.normalized, own.get("weight"), own.get("bias"))
        targets = (take, None)
    else:
        weight_slot, weight_target = handle.gradient_target("weight")
        bias_slot, bias_target = handle.gradient_target("bias")
        targets = (weight_target, bias_target)
    rest = (targets, shape, self.eps, *place)
    return run(handle, LayerNorm, x, weight, bias, weight_slot, bias_slot, rest)


def _when(handle: LayerState, x: Tensor, shape: list[int]) -> str | None:
    """Returns when the kernel for the weights' gradients is launched; None: there is none."""
    private_step = handle.private_step
    if not private_step.fused or (private_step.is_compiled and torch.compiler.is_compiling()):
        return None
    if not available(x.device, x.dtype):
        return None
    return LATER if len(shape) == 1 and not handle.always_dense else NOW


def per_sample(x: Tensor, layout: Layout, batch_size: int, shape: list[int]) -> Tensor:
    """Returns x [.., *shape] in any layout as [B, T, *shape]."""
    return layout.batch_first(x, batch_size).reshape(batch_size, -1, *shape)


def by_token(x: Tensor, layout: Layout, batch_size: int, dims: int) -> Tensor:
    """Returns x [.., *shape], `dims` dimensions, in any layout as [B, T, features]."""
    if layout.kind != "dimension" or layout.dim:
        x = layout.batch_first(x, batch_size)
    if x.ndim == 3 and dims == 1:
        return x
    return x.reshape(batch_size, -1, x.shape[x.ndim - dims :].numel())


class RMSNorm(torch.autograd.Function):
    """Runs `F.rms_norm`; its backward computes and delivers its weight's G [B, *shape].

    Or what G follows from, if `when` is LATER.

    `rest` has what is no tensor: PyTorch looks at each argument in Python. `copy`: one of `COPIES`,
    None for `nn.RMSNorm`.
    """

    @staticmethod
    def forward(ctx, x, weight, slot, rest):
        target, shape, eps, kind, dim, batch_size, when, copy = rest
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
        ctx.rest = (shape, dims, Layout(kind, dim), batch_size, x.requires_grad, slot is not None)
        ctx.target, ctx.when = target, when
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight, rstd = ctx.saved_tensors
        gy = tensor_parallel.arrived(gy)
        shape, dims, layout, batch_size, wants_x, wants_weight = ctx.rest
        gx = _rms_norm_input_gradient(gy, x, weight, rstd, shape, dims) if wants_x else None
        gradients = None
        if wants_weight and ctx.when is not None:
            place = (layout, batch_size, len(shape))
            operands = Normalized(
                by_token(gy, *place), by_token(x, *place), by_token(rstd, *place).flatten(1)
            )
            if ctx.when == LATER:
                ctx.target(operands)
            else:
                gradients, _ = norm_layer_gradients([operands])[0]
                gradients = deliver(ctx.target, gradients.view(batch_size, *shape))
        elif wants_weight:
            product = by_token(gy * x, layout, batch_size, len(shape))
            scale = by_token(rstd, layout, batch_size, len(shape))
            # Σ_t rstd_t (y_t · x_t): a row times a matrix for each sample
            scale = scale.to(product.dtype)
            gradients = torch.bmm(scale.mT, product).view(batch_size, *shape)
            gradients = deliver(ctx.target, gradients.to(accumulation_dtype(x.dtype)))
        return gx, None, gradients, None


def _rms_norm_input_gradient(gy, x, weight, rstd, shape, dims) -> Tensor:
    backward = fused_rms_norm_backward() if x.is_cuda else None
    if backward and weight.dtype == x.dtype == gy.dtype:
        return backward(gy, x, shape, rstd, weight, [True, False])[0]
    dtype = accumulation_dtype(x.dtype)
    normalized, scaled = x.to(dtype) * rstd, gy.to(dtype) * weight
    mean = (scaled * normalized).mean(dims, keepdim=True)
    return (rstd * (scaled - normalized * mean)).to(x.dtype)


class LayerNorm(torch.autograd.Function):
    """Runs `F.layer_norm`; its backward computes and delivers its two G [B, *shape].

    Or what they follow from, if `when` is LATER.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        ctx.targets, shape, eps, kind, dim, batch_size, ctx.when = rest
        wants = x.requires_grad, weight_slot is not None, bias_slot is not None
        if x.dtype != weight.dtype:  # under autocast
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.rest = (shape, Layout(kind, dim), batch_size, wants)
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        gy = tensor_parallel.arrived(gy)
        shape, layout, batch_size, (wants_x, wants_weight, wants_bias) = ctx.rest
        gx = None
        if wants_x:
            backward = torch.ops.aten.native_layer_norm_backward
            gx = backward(gy, x, shape, mean, rstd, weight, bias, [True, False, False])[0]
        dtype = accumulation_dtype(x.dtype)
        weights = biases = None
        if ctx.when is not None and (wants_weight or wants_bias):
            place = (layout, batch_size, len(shape))
            rows = [by_token(t, *place).flatten(1) for t in (rstd, mean)]
            operands = Normalized(by_token(gy, *place), by_token(x, *place), *rows, wants_bias)
            if ctx.when == LATER:
                ctx.targets[0](operands)
                return gx, *[None] * 5
            weights, biases = norm_layer_gradients([operands])[0]
            weights = (
                deliver(ctx.targets[0], weights.view(batch_size, *shape)) if wants_weight else None
            )
            if wants_bias:
                biases = deliver(ctx.targets[1], biases.view(batch_size, *shape))
            return gx, None, None, weights, biases, None
        if wants_weight:
            normalized = (x.to(dtype) - mean.to(dtype)) * rstd.to(dtype)
            weights = per_sample(gy.to(dtype) * normalized, layout, batch_size, shape).sum(1)
            weights = deliver(ctx.targets[0], weights)
        if wants_bias:
            biases = per_sample(gy, layout, batch_size, shape).sum(1, dtype=dtype)
            biases = deliver(ctx.targets[1], biases)
        return gx, None, None, weights, biases, None
