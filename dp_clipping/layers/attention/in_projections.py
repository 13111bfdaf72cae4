"""Projects queries, keys and values, whose weights or biases may be parts of one parameter.

Rows of a weight W [3E, E] project other inputs. Its G_i has the rows of each part, so all inputs
are tokens of one linear layer, whose output gradients are zero in the rows of the other parts.
"""

from typing import Any

import torch
import torch.nn.functional as F

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import deliver


class InProjections(torch.autograd.Function):
    """Computes y_j = x_j W_jᵀ + b_j for the parts W_j, b_j of W and b.

    Args:
        weight, bias: detached.
        uses: slots of W and b, and the functions that receive W's factors and b's output
            gradients (see `projection.weight_use`).
        sizes: rows of each part.
        layouts: the layouts of each x_j.
        xs: the inputs.
    """

    @staticmethod
    def forward(ctx, weight, bias, weight_slot, bias_slot, takes, sizes, layouts, batch_size, *xs):
        ctx.save_for_backward(weight, *xs)
        ctx.rest = takes, sizes, layouts, batch_size
        parts = weight.split(sizes)
        biases = [None] * len(xs) if bias is None else bias.split(sizes)
        return tuple(F.linear(*one).data for one in zip(xs, parts, biases, strict=True))

    @staticmethod
    def backward(ctx, *gys):
        weight, *xs = ctx.saved_tensors
        takes, sizes, layouts, batch_size = ctx.rest
        gys = [tensor_parallel.arrived(gy) for gy in gys]
        parts = weight.split(sizes)
        inputs = [
            gy @ part if needed else None
            for gy, part, needed in zip(gys, parts, ctx.needs_input_grad[8:], strict=True)
        ]
        slots: list[Any] = [None, None]
        if takes[0] or takes[1]:
            tokens, before = [], 0
            for gy, size, layout in zip(gys, sizes, layouts, strict=True):
                y = layout.batch_tokens(gy, batch_size)
                tokens.append(F.pad(y, (before, len(weight) - before - size)))
                before += size
            y = torch.cat(tokens, 1)
            if takes[0]:
                a = [x.batch_tokens(z, batch_size) for x, z in zip(layouts, xs, strict=True)]
                slots[0] = takes[0](torch.cat(a, 1), y)
            slots[1] = takes[1] and takes[1](y)
        return None, None, *slots, *[None] * 4, *inputs


class AddBiases(torch.autograd.Function):
    """Computes y_j = x_j + b_j for the equally long parts b_j of a bias b [d]."""

    @staticmethod
    def forward(ctx, bias, slot, target, layouts, batch_size, *xs):
        ctx.rest = slot is not None, target, layouts, batch_size
        return tuple(x + b for x, b in zip(xs, bias.to(xs[0].dtype).chunk(len(xs)), strict=True))

    @staticmethod
    def backward(ctx, *gys):
        wants_bias, target, layouts, batch_size = ctx.rest
        gys = tuple([tensor_parallel.arrived(gy) for gy in gys])
        biases = None
        if wants_bias:
            dtype = accumulation_dtype(gys[0].dtype)
            sums = [
                layout.batch_tokens(gy, batch_size).sum(1, dtype=dtype)
                for layout, gy in zip(layouts, gys, strict=True)
            ]
            biases = deliver(target, torch.cat(sums, 1))
        return None, biases, None, None, None, *gys


class RepeatToken(torch.autograd.Function):
    """One token [1, 1, E] for each of N sequences: [1, N, E]."""

    @staticmethod
    def forward(ctx, token, slot, target, layout: Layout, batch_size, count):
        ctx.rest = slot is not None, target, layout, batch_size
        return token.repeat(1, count, 1)

    @staticmethod
    def backward(ctx, gy):
        wants, target, layout, batch_size = ctx.rest
        gy = tensor_parallel.arrived(gy)
        gradients = None
        if wants:
            rows = layout.batch_tokens(gy[0].unsqueeze(1), batch_size)
            total = rows.sum(1, dtype=accumulation_dtype(gy.dtype))
            gradients = deliver(target, total[:, None, None])
        return None, gradients, *[None] * 4
