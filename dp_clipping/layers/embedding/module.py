"""Embeddings: y = W[ids], so row v of G_i is the sum of output gradients of sample i's tokens v.

In a region that `torch.compile` traces, ids and output gradients are the gradients of slots, as
`layers.linear` explains.
"""

from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.embedding.factors import EmbeddingFactors, by_sample, without_padding
from dp_clipping.layers.handle import LayerState, forward_of
from dp_clipping.layers.recorder import CHANGED, FACTORS, LOOK_UP_SLOTS

SETTINGS = attrgetter("padding_idx")


def _first_call(self: nn.Embedding, handle: LayerState, ids: Tensor) -> Tensor:
    weight = self.weight
    call, padding_idx = tensor_parallel.embedding(handle, ids, weight, self.padding_idx)
    layout, ids = handle.batched(call.x)
    if torch.compiler.is_compiling():
        return call.leave(_run_compiled(handle, ids, call.weight.detach(), layout, padding_idx))
    given = call.x if call.mesh is None else None
    own = (call.weight, None)
    return call.leave(handle.run(Embedding, self, ids, layout, *own, padding_idx, SETTINGS, given))


forward = forward_of("embedding", _first_call)


def _run_compiled(
    handle: LayerState, ids: Tensor, weight: Tensor, layout: Layout, padding_idx: int | None
) -> Tensor:
    rest = (None, (layout.kind, layout.dim, handle.private_step.batch_size), padding_idx)
    if "count" not in handle.slots:  # weights that are used several times, or plain arithmetic
        return Embedding.apply(ids, weight, handle.slot("weight"), None, None, rest)
    y, tokens, count = (handle.slots[name] for name in LOOK_UP_SLOTS)
    if y.dtype != weight.dtype:
        raise ValueError(f"{handle.name} is given another dtype {CHANGED}")
    if tokens.numel() != ids.numel():
        raise ValueError(f"{handle.name} is given another number of tokens {CHANGED}")
    return Embedding.apply(ids, weight, y, tokens, count, rest)


class Embedding(torch.autograd.Function):
    """Runs `F.embedding`; its backward leaves ids and output gradients.

    `rest` has the site, the private step and the padding's id. In a compiled region it has None and
    where samples are: there backward returns the gradients of slots. Those are output gradients,
    ids and a count of 1, or G [B, V, d] alone where `tokens` is None.
    """

    @staticmethod
    def forward(ctx, ids, weight, first, tokens, count, rest):
        ctx.save_for_backward(ids)
        ctx.rest, ctx.vocabulary, ctx.slots = rest, weight.shape[0], None
        if rest[0] is None:
            ctx.slots = first.dtype, None if tokens is None else tokens.dtype
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        site, private_step, padding_idx = ctx.rest
        if site is None:
            kind, dim, batch_size = private_step
            layout = Layout(kind, dim)
        else:
            layout, batch_size = site.layout, private_step.batch_size
        ids, gy = by_sample(ids, tensor_parallel.arrived(gy), layout, batch_size)
        gy = without_padding(ids, gy, padding_idx)
        if site is None:
            dtype, of_tokens = ctx.slots
            if of_tokens is None:
                gradients = EmbeddingFactors(ids, gy, ctx.vocabulary).dense().to(dtype)
                return None, None, gradients, None, None, None
            one = gy.new_ones(1, dtype=torch.float32)
            return None, None, gy, ids.to(of_tokens), one, None
        factors = EmbeddingFactors(ids, gy, ctx.vocabulary)
        private_step.take(FACTORS, site.records, factors, factors.held(factors))
        return None, None, None, None, None, None
