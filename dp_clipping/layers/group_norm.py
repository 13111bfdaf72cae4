"""GroupNorm and InstanceNorm: y = x̂ · w + b, so G_i = Σ_l y_il · x̂_il for w and Σ_l y_il for b.

x̂ is the input normalised over groups of channels (Wu and He 2018) or over each channel (Ulyanov et
al. 2016), l runs over pixels. PyTorch's own backward computes the input's gradient, and
only that.
"""

from math import prod
from operator import attrgetter

import torch
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.kernels.channel_sums import Channels, channel_sums
from dp_clipping.kernels.launch.tiles import AT_ONCE, available
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.handle import LayerState, forward_of, norm_operands
from dp_clipping.layers.recorder import DENSE, NORMALIZED

KINDS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_plain(module: nn.Module, kind: type) -> bool:
    """Returns whether a module is PyTorch's, with a weight and each picture's own statistics."""
    uses_own = not getattr(module, "track_running_stats", False)
    return kind in KINDS and module.weight is not None and uses_own


def _first_call(self: nn.Module, handle: LayerState, x: Tensor) -> Tensor:
    weight, bias = self.weight, self.bias
    tensor_parallel.refuse_distributed(handle, x, weight, bias)
    given = tensor_parallel.settled(x)
    layout, x = handle.batched(given)
    private_step, batch_size = handle.private_step, handle.private_step.batch_size
    rows = layout.batch_first(x, batch_size)
    pictures = rows.shape[1] if rows.ndim > x.ndim else None
    rows = rows if pictures is None else rows.flatten(0, 1)
    is_group_norm = isinstance(self, nn.GroupNorm)
    reads = attrgetter("num_groups" if is_group_norm else "num_features", "eps")
    if torch.compiler.is_compiling():
        groups = self.num_groups if is_group_norm else self.num_features
        slots = handle.slot("weight"), handle.slot("bias")
        bias = None if bias is None else bias.detach()
        rest = (None, batch_size, (groups, self.eps))
        y = GroupNorm.apply(rows, weight.detach(), bias, *slots, rest)
    else:
        options = reads(self)
        site = handle.site(GroupNorm, x, layout, options=options, settings=options, reads=reads)
        if rows is given:
            handle.keep(given, site)
        y = site.use(private_step, rows, weight, bias)
    return layout.restore(y if pictures is None else y.unflatten(0, (batch_size, pictures)))


forward = forward_of("group_norm", _first_call)


class GroupNorm(torch.autograd.Function):
    """Runs `F.group_norm`; its backward leaves what its two G [B, C] follow from.

    `rest` has the site and the private step. In a compiled region it has None, the batch size and
    the options: there the G are the gradients of the slots.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        groups, eps = rest[2] if rest[0] is None else rest[0].options
        ctx.wants = x.requires_grad, weight_slot is not None, bias_slot is not None
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
        site, private_step = ctx.rest[:2]
        wants_x, wants_weight, wants_bias = ctx.wants
        gx = None
        if wants_x:
            backward = torch.ops.aten.native_group_norm_backward
            gx = backward(gy, x, mean, rstd, weight, *ctx.sizes, [True, False, False])[0]
        batch_size = ctx.rest[1] if site is None else private_step.batch_size
        # `Channels(..)` would call a function in Python.
        use = tuple.__new__(Channels, (x, gy, mean, rstd, batch_size))
        if site is None:
            weights, biases = use.plain(accumulation_dtype(x.dtype))
            of_slots = weights if wants_weight else None, biases if wants_bias else None
            return gx, None, None, *of_slots, None
        own = site.weight, site.bias
        is_large = 2 * gy.nbytes > AT_ONCE
        if is_large and private_step.fused and available(x.device, x.dtype):
            (formed,) = channel_sums([use])
            for record, gradients in zip(own, formed, strict=True):
                if record is not None:
                    private_step.take(DENSE, (record,), (gradients, None), (gradients,))
        elif site.records:
            private_step.take(NORMALIZED, site.records, (use, own), (x, gy))
        return gx, None, None, None, None, None
