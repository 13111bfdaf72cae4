"""Normalisations: y = x̂ · w + b, so G_i = Σ_t y_it · x̂_it for w and Σ_t y_it for b.

x̂ is the normalised input: over features (Zhang and Sennrich 2019 for RMSNorm, Ba et al. 2016 for
LayerNorm), or over groups of channels (Wu and He 2018) or each channel (Ulyanov et al. 2016), where
t runs over pixels. Over features PyTorch's own backward computes the input's gradient, and only
that; the weights' gradients are one elementwise product and one sum over a sample's tokens. Over
channels the input's gradient follows from the sums of each picture: kernels compute both.
"""

from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import accumulation_dtype, sum_of_pictures
from dp_clipping.kernels.group_norm import channel_sums_plain, group_norm_backward
from dp_clipping.kernels.norm_layer_gradients import Normalized
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, forward_of
from dp_clipping.layers.recorder import DENSE, NORMALIZED
from dp_clipping.layers.rms_norm_copies import COPIES, copied
from dp_clipping.torch_compat import fused_rms_norm, fused_rms_norm_backward


def _first_call(self: nn.RMSNorm | nn.LayerNorm, handle: LayerState, x: Tensor) -> Tensor:
    call = tensor_parallel.norm(handle, x, self.weight, getattr(self, "bias", None))
    weight, bias, kind = call.weight, call.bias, handle.kind
    layout, x = handle.batched(call.x)
    shape = list(weight.shape)
    if kind in COPIES and x.shape[-1:] != weight.shape:
        raise ValueError(
            f"{handle.title(self)} has a weight of shape "
            f"{shape} for inputs of {x.shape[-1]} features, and a weight that is broadcast has "
            f"no per-sample gradients here: build it with {x.shape[-1]} features"
        )
    setting = COPIES[kind][0] if kind in COPIES else "eps"
    eps = getattr(self, setting)
    options = (shape, eps, kind if kind in COPIES else None)
    function = LayerNorm if kind == "layer_norm" else RMSNorm
    given = call.x if call.mesh is None else None
    reads = attrgetter(setting)
    return call.leave(handle.run(function, self, x, layout, weight, bias, options, reads, given))


forward = forward_of("norm", _first_call)


def plain_gradients(
    use: Normalized, dtype: torch.dtype = torch.float64
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients [B, d] of weight and bias by reference: in float64, rounded once.

    Args:
        dtype: that it is computed in; another one is that of the results, too.
    """
    y, weight = use.y.to(dtype), None
    if use.x is not None and use.rstd is not None:
        normalized = use.x.to(dtype)
        if use.mean is not None:
            normalized = normalized - use.mean.to(dtype)[..., None]
        weight = (y * (normalized * use.rstd.to(dtype)[..., None])).sum(1)
    bias = y.sum(1) if use.with_bias else None
    if dtype == torch.float64 and use.y.dtype != dtype:
        weight, bias = (None if g is None else g.float() for g in (weight, bias))
    return weight, bias


class Norm(torch.autograd.Function):
    """The backward of a normalisation: it leaves what the G of its weight and bias follow from.

    `rest` has the site, the private step and options. In a compiled region it has None and where
    samples are: there backward returns G [B, *shape] as the gradients of the slots.
    """

    @staticmethod
    def backward(ctx, gy):
        x, weight, bias, rstd, mean = ctx.saved_tensors
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        site, private_step, (shape, *_) = ctx.rest
        gx = None
        if ctx.needs_input_grad[0]:
            if mean is None:
                gx = _rms_norm_input_gradient(gy, x, weight, rstd, shape)
            else:
                only_x = [True, False, False]
                gx = _layer_norm_backward(gy, x, shape, mean, rstd, weight, bias, only_x)[0]
        wants = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        if site is None:
            kind, dim, batch_size = private_step
            layout, has_bias = Layout(kind, dim), wants[1]
        else:
            layout, batch_size = site.layout, private_step.batch_size
            has_bias = site.bias is not None
        y, has_mean = gy, mean is not None
        if layout is not None:
            y, x, rstd = (layout.batch_first(t, batch_size) for t in (y, x, rstd))
            mean = layout.batch_first(mean, batch_size) if has_mean else None
        tokens = (batch_size, -1, prod(shape))
        y, x, rstd = y.reshape(tokens), x.reshape(tokens), rstd.reshape(batch_size, -1)
        mean = mean.reshape(batch_size, -1) if has_mean else None
        if site is None:
            use = Normalized(y, x, rstd, mean, has_bias)
            formed = plain_gradients(use, accumulation_dtype(x.dtype))
            of_slots = zip(formed, wants, strict=True)
            slots = [g.view(batch_size, *shape) if wanted else None for g, wanted in of_slots]
            return gx, None, None, *slots, None
        # `Normalized(..)` would call a function in Python.
        use = tuple.__new__(Normalized, (y, x, rstd, mean, has_bias))
        value = use, (site.weight, site.bias)
        private_step.take(NORMALIZED, site.records, value, (y, x, rstd))
        return gx, None, None, None, None, None


class RMSNorm(Norm):
    """Runs `F.rms_norm`, or a copy of it."""

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        shape, eps, copy = rest[2]
        if copy:
            y, weight, rstd = copied(copy, x, weight, eps)
        elif x.is_cuda and weight.dtype == x.dtype:
            y, rstd = fused_rms_norm(x, shape, weight, eps)
        else:
            y = F.rms_norm(x, shape, weight, eps)
            dtype = accumulation_dtype(x.dtype)
            eps = torch.finfo(dtype).eps if eps is None else eps  # PyTorch's own default
            dims = list(range(-len(shape), 0))
            rstd = (x.to(dtype).square().mean(dims, keepdim=True) + eps).rsqrt()
        ctx.rest = rest
        if rest[0] is None:
            ctx.save_for_backward(x, weight, None, rstd, None)
        else:
            ctx.to_save = x, weight, None, rstd, None  # by no function in Python
        return y


class LayerNorm(Norm):
    """Runs `F.layer_norm`."""

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        shape, eps, _ = rest[2]
        if torch.is_autocast_enabled("cuda"):
            x, weight, bias = norm_operands(x, weight, bias)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.rest = rest
        if rest[0] is None:
            ctx.save_for_backward(x, weight, bias, rstd, mean)
        else:
            ctx.to_save = x, weight, bias, rstd, mean
        return y


def _rms_norm_input_gradient(gy, x, weight, rstd, shape) -> Tensor:
    if x.is_cuda and weight.dtype == x.dtype == gy.dtype:
        return fused_rms_norm_backward(gy, x, shape, rstd, weight, [True, False])[0]
    dtype = accumulation_dtype(x.dtype)
    dims = list(range(-len(shape), 0))
    normalized, scaled = x.to(dtype) * rstd, gy.to(dtype) * weight
    mean = (scaled * normalized).mean(dims, keepdim=True)
    return (rstd * (scaled - normalized * mean)).to(x.dtype)


_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def norm_operands(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Returns the operands as autocast would make them for a normalisation: float32 on a GPU."""
    if not x.is_cuda or not torch.is_autocast_enabled("cuda"):
        return (x, *parameters)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(None if t is None else t.to(dtype) for t in (x, *parameters))


OF_CHANNELS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_plain_of_channels(module: nn.Module, kind: type) -> bool:
    """Returns whether a module is PyTorch's, with a weight and each picture's own statistics."""
    uses_own = not getattr(module, "track_running_stats", False)
    return kind in OF_CHANNELS and module.weight is not None and uses_own


def _first_call_of_channels(self: nn.Module, handle: LayerState, x: Tensor) -> Tensor:
    tensor_parallel.refuse_distributed(handle, x, self.weight, self.bias)
    rows, layout, restored = handle.pictures(tensor_parallel.settled(x))
    groups = "num_groups" if isinstance(self, nn.GroupNorm) else "num_features"
    reads = attrgetter(groups, "eps")
    own, given = (self.weight, self.bias), x if rows is x else None
    return restored(handle.run(GroupNorm, self, rows, layout, *own, reads(self), reads, given))


forward_of_channels = forward_of("group_norm", _first_call_of_channels)


class GroupNorm(torch.autograd.Function):
    """Runs `F.group_norm`; its backward leaves G [B, C] of weight and bias.

    `rest` has the site, the private step and options. In a compiled region it has None and where
    samples are: there the G are the gradients of the slots.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        groups, eps = rest[2]
        if torch.is_autocast_enabled("cuda"):
            x, weight, bias = norm_operands(x, weight, bias)
        x = x.contiguous()
        pictures, channels, *pixels = x.shape
        ctx.rest, ctx.sizes = rest, (pictures, channels, prod(pixels), groups)
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *ctx.sizes, eps)
        if rest[0] is None:
            ctx.save_for_backward(x, weight, mean, rstd)
        else:
            ctx.to_save = x, weight, mean, rstd  # by no function in Python
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight, mean, rstd = ctx.saved_tensors
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        gy = gy.contiguous()
        site, private_step, _ = ctx.rest
        wants_x, *_, wants_weight, wants_bias, _ = ctx.needs_input_grad
        if site is not None:
            wants_weight, wants_bias = site.weight is not None, site.bias is not None
        operands, sums, gx = (x, gy, mean, rstd), None, None
        if site is not None and x.dtype in private_step.kernel_dtypes:
            sums, gx = group_norm_backward(*operands, weight, wants_x)
        elif wants_x:
            backward = torch.ops.aten.native_group_norm_backward
            gx = backward(gy, x, mean, rstd, weight, *ctx.sizes, [True, False, False])[0]
        if sums is None:
            sums = channel_sums_plain(*operands, accumulation_dtype(x.dtype))
        batch_size = private_step[2] if site is None else private_step.batch_size
        weights, biases = sums
        if len(x) != batch_size:
            weights, biases = (sum_of_pictures(own, batch_size) for own in (weights, biases))
        if site is None:
            slots = weights if wants_weight else None, biases if wants_bias else None
            return gx, None, None, *slots, None
        if not wants_bias:
            private_step.take(DENSE, site.records, None, (weights,))
        elif not wants_weight:
            private_step.take(DENSE, site.records, None, (biases,))
        else:
            private_step.take(DENSE, site.records, None, (weights, biases))
        return gx, None, None, None, None, None
