"""Projects queries, keys and values, whose weights or biases may be parts of one parameter.

Rows of a weight W [3E, E] project other inputs. Its G_i has the rows of each part, so all inputs
are tokens of one linear layer, whose output gradients are zero in the rows of the other parts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.recorder import DENSE, LINEAR


class InProjections(torch.autograd.Function):
    """Computes y_j = x_j W_jᵀ + b_j for the parts W_j, b_j of W and b.

    Args:
        weight, bias: detached.
        rest: the site of W and b, the private step, the rows of each part, and where the samples
            are in each x_j.
        xs: the inputs.
    """

    @staticmethod
    def forward(ctx, weight, bias, trigger, rest, *xs):
        site, private_step, sizes, _ = ctx.rest = rest
        ctx.save_for_backward(weight, *xs)
        if site.planned is not None:
            tokens = torch.Size((sum(x[..., 0].numel() for x in xs), weight.shape[1]))
            private_step.plans.calls.append((site.planned, tokens, weight.dtype, len(weight)))
        parts = weight.split(sizes)
        biases = [None] * len(xs) if bias is None else bias.split(sizes)
        return tuple(F.linear(*one).data for one in zip(xs, parts, biases, strict=True))

    @staticmethod
    def backward(ctx, *gys):
        weight, *xs = ctx.saved_tensors
        site, private_step, sizes, layouts = ctx.rest
        gys = [tensor_parallel.arrived(gy) for gy in gys]
        parts = weight.split(sizes)
        inputs = [
            gy @ part if needed else None
            for gy, part, needed in zip(gys, parts, ctx.needs_input_grad[4:], strict=True)
        ]
        if site.records:
            batch_size, before = private_step.batch_size, 0
            ys, tokens = [], []
            for gy, x, size, layout in zip(gys, xs, sizes, layouts, strict=True):
                y = layout.batch_tokens(gy, batch_size)
                ys.append(F.pad(y, (before, len(weight) - before - size)))
                tokens.append(layout.batch_tokens(x, batch_size))
                before += size
            y, a = torch.cat(ys, 1), torch.cat(tokens, 1)
            private_step.take(LINEAR, site.records, (y, a, site), (y, a))
        return None, None, None, None, *inputs


class AddBiases(torch.autograd.Function):
    """Computes y_j = x_j + b_j for the equally long parts b_j of a bias b [d].

    `rest` has the record of b, the private step, and where the samples are in each x_j.
    """

    @staticmethod
    def forward(ctx, bias, trigger, rest, *xs):
        ctx.rest = rest
        return tuple(x + b for x, b in zip(xs, bias.to(xs[0].dtype).chunk(len(xs)), strict=True))

    @staticmethod
    def backward(ctx, *gys):
        record, private_step, layouts = ctx.rest
        gys = tuple([tensor_parallel.arrived(gy) for gy in gys])
        if record is not None:
            dtype = accumulation_dtype(gys[0].dtype)
            sums = [
                layout.batch_tokens(gy, private_step.batch_size).sum(1, dtype=dtype)
                for layout, gy in zip(layouts, gys, strict=True)
            ]
            _leave(private_step, record, torch.cat(sums, 1))
        return None, None, None, *gys


class RepeatToken(torch.autograd.Function):
    """One token [1, 1, E] for each of N sequences: [1, N, E].

    `rest` has its record, the private step, and where the samples are among the sequences.
    """

    @staticmethod
    def forward(ctx, token, trigger, rest, count):
        ctx.rest = rest
        return token.repeat(1, count, 1)

    @staticmethod
    def backward(ctx, gy):
        record, private_step, layout = ctx.rest
        if record is not None:
            gy = tensor_parallel.arrived(gy)
            rows = layout.batch_tokens(gy[0].unsqueeze(1), private_step.batch_size)
            total = rows.sum(1, dtype=accumulation_dtype(gy.dtype))
            _leave(private_step, record, total[:, None, None])
        return None, None, None, None


def _leave(private_step, record, gradients: Tensor) -> None:
    private_step.take(DENSE, (record,), (gradients, None), (gradients,))
