"""Embeddings: y = W[ids], so row v of G_i is the sum of output gradients of sample i's tokens v."""

from operator import attrgetter

import torch
from torch import Tensor, nn

from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.embedding.factors import (
    EmbeddingFactors,
    by_sample,
    look_up,
    without_padding,
)
from dp_clipping.layers.handle import LayerState, forward_of
from dp_clipping.layers.recorder import FACTORS

SETTINGS = attrgetter("padding_idx")


def _first_call(self: nn.Embedding, handle: LayerState, ids: Tensor) -> Tensor:
    weight = self.weight
    call, padding_idx = tensor_parallel.embedding(handle, ids, weight, self.padding_idx)
    layout, ids = handle.batched(call.x)
    private_step = handle.private_step
    if torch.compiler.is_compiling():
        rest = (None, (layout.kind, layout.dim, private_step.batch_size), padding_idx)
        slot = handle.slot("weight")
        return call.leave(Embedding.apply(ids, call.weight.detach(), None, slot, None, rest))
    site = handle.site(
        Embedding, ids, layout, options=padding_idx, settings=padding_idx, reads=SETTINGS
    )
    if call.mesh is None:
        handle.keep(call.x, site)
    return call.leave(site.use(private_step, ids, call.weight))


forward = forward_of("embedding", _first_call)


class Embedding(torch.autograd.Function):
    """Runs `F.embedding`; its backward leaves ids and output gradients.

    `rest` has the site and the private step. In a compiled region it has None, where samples are,
    and the padding's id: there backward returns G [B, V, d] as the gradient of the slot.
    """

    @staticmethod
    def forward(ctx, ids, weight, _, slot, __, rest):
        ctx.save_for_backward(ids)
        ctx.rest, ctx.vocabulary, ctx.slot_dtype = rest, weight.shape[0], slot.dtype
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        gy = tensor_parallel.arrived(gy)
        site, private_step = ctx.rest[:2]
        if site is None:
            kind, dim, batch_size = ctx.rest[1]
            layout, padding_idx = Layout(kind, dim), ctx.rest[2]
        else:
            layout, padding_idx = site.layout, site.options
            batch_size = private_step.batch_size
        ids, gy = by_sample(ids, gy, layout, batch_size)
        factors = EmbeddingFactors(ids, without_padding(ids, gy, padding_idx), ctx.vocabulary)
        if site is None:
            return None, None, None, factors.dense().to(ctx.slot_dtype), None, None
        private_step.take(FACTORS, site.records, factors, factors.held(factors))
        return None, None, None, None, None, None
