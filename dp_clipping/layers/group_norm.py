"""GroupNorm and InstanceNorm: y = x̂ · w + b, so G_i = Σ_l y_il · x̂_il for w and Σ_l y_il for b.

x̂ is the input normalised over groups of channels (Wu and He 2018) or over each channel (Ulyanov et
al. 2016), l runs over pixels. PyTorch's own backward computes the input's gradient, and
only that.
"""

from functools import partial

import torch
from torch import Tensor, nn

from dp_clipping.kernels.channel_sums import channel_sums, channel_sums_plain
from dp_clipping.kernels.launch.tiles import available
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.handle import LayerState, deliver, run, sum_of_pictures
from dp_clipping.torch_compat import apply_directly

KINDS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_plain(module: nn.Module, kind: type) -> bool:
    """Returns whether a module is PyTorch's, with a weight and each picture's own statistics."""
    uses_own = not getattr(module, "track_running_stats", False)
    return kind in KINDS and module.weight is not None and uses_own


def forward(self: nn.Module, x: Tensor) -> Tensor:
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, x)
    weight, bias, private_step = self.weight, self.bias, handle.private_step
    if (site := handle.site_of(x)) is not None and site.layout is None:
        weight_slot = weight_target = bias_slot = bias_target = None
        if (record := site.weight) is not None:
            weight_slot, weight_target = record.trigger, partial(private_step.dense, record)
        if (record := site.bias) is not None:
            bias_slot, bias_target = record.trigger, partial(private_step.dense, record)
        is_group_norm = isinstance(self, nn.GroupNorm)
        groups = self.num_groups if is_group_norm else self.num_features
        targets, batch_size = (weight_target, bias_target), private_step.batch_size
        rest = (targets, batch_size, groups, self.eps, private_step.fused)
        bias = None if bias is None else bias.detach()
        return _run_group_norm(x, weight.detach(), bias, weight_slot, bias_slot, rest)
    given = x
    tensor_parallel.refuse_distributed(handle, x, weight, bias)
    layout, x = handle.batched(tensor_parallel.settled(x))
    batch_size, is_group_norm = handle.private_step.batch_size, isinstance(self, nn.GroupNorm)
    rows = layout.batch_first(x, batch_size)
    channels = self.num_channels if is_group_norm else self.num_features
    pictures = None
    if rows.ndim > x.ndim:
        pictures, rows = rows.shape[1], rows.flatten(0, 1)
    elif not handle.joined:
        handle.keep_site(given, layout)
    groups = self.num_groups if is_group_norm else channels
    weight_slot, weight_target = handle.gradient_target("weight")
    bias_slot, bias_target = handle.gradient_target("bias")
    fused = handle.private_step.fused and not torch.compiler.is_compiling()
    rest = ((weight_target, bias_target), batch_size, groups, self.eps, fused)
    bias = None if bias is None else bias.detach()
    y = run(handle, GroupNorm, rows, weight.detach(), bias, weight_slot, bias_slot, rest)
    return layout.restore(y if pictures is None else y.unflatten(0, (batch_size, pictures)))


class GroupNorm(torch.autograd.Function):
    """Runs `F.group_norm`; its backward computes and delivers its two G [B, C]."""

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        ctx.targets, batch_size, groups, eps, fused = rest
        ctx.wants = x.requires_grad, weight_slot is not None, bias_slot is not None
        if x.is_cuda and torch.is_autocast_enabled("cuda"):  # which computes it in float32
            dtype = torch.promote_types(x.dtype, torch.float32)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        x = x.contiguous()
        sizes = len(x), x.shape[1], x.shape[2:].numel(), groups
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.rest = batch_size, sizes, fused
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight, mean, rstd = ctx.saved_tensors
        gy = tensor_parallel.arrived(gy).contiguous()
        batch_size, sizes, fused = ctx.rest
        wants_x, wants_weight, wants_bias = ctx.wants
        gx = weights = biases = None
        if wants_x:
            backward = torch.ops.aten.native_group_norm_backward
            gx = backward(gy, x, mean, rstd, weight, *sizes, [True, False, False])[0]
        if wants_weight or wants_bias:
            serves = fused and available(x.device, x.dtype)
            sums = (channel_sums if serves else channel_sums_plain)(x, gy, mean, rstd)
            weights, biases = sums
            if len(weights) != batch_size:
                weights = sum_of_pictures(weights, batch_size)
                biases = sum_of_pictures(biases, batch_size)
        weights = deliver(ctx.targets[0], weights) if wants_weight else None
        biases = deliver(ctx.targets[1], biases) if wants_bias else None
        return gx, None, None, weights, biases, None


_run_group_norm = apply_directly(GroupNorm)
