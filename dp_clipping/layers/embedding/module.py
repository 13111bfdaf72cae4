"""Embeddings: y = W[ids], so row v of G_i is the sum of output gradients of sample i's tokens v."""

import torch
from torch import Tensor, nn

from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.embedding.factors import (
    EmbeddingFactors,
    batch_tokens,
    look_up,
    without_padding,
)
from dp_clipping.layers.handle import LayerState, run


def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, ids)
    call, padding_idx = tensor_parallel.embedding(handle, ids, self.weight, self.padding_idx)
    layout, ids = handle.batched(call.x)
    private_step, weight = handle.private_step, call.weight.detach()
    if handle.keeps_dense():
        place = (layout.kind, layout.dim, private_step.batch_size)
        return call.leave(
            run(handle, Dense, ids, weight, handle.slot("weight"), padding_idx, *place)
        )
    trigger = handle.parameter("weight").trigger
    return call.leave(run(handle, Factors, ids, weight, trigger, handle, padding_idx, layout))


class Dense(torch.autograd.Function):
    """Runs `F.embedding`; its backward returns G [B, V, d] as the gradient of `slot`."""

    @staticmethod
    def forward(ctx, ids, weight, slot, padding_idx, kind, dim, batch_size):
        ctx.save_for_backward(ids)
        ctx.rest = (padding_idx, kind, dim, batch_size, slot.shape, slot.dtype)
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        padding_idx, kind, dim, batch_size, shape, dtype = ctx.rest
        gy = tensor_parallel.arrived(gy)
        ids, gy = batch_tokens(ids, gy, Layout(kind, dim), batch_size)
        factors = EmbeddingFactors(ids, without_padding(ids, gy, padding_idx), shape[1])
        return None, None, factors.dense().to(dtype), None, None, None, None


class Factors(torch.autograd.Function):
    """Runs `F.embedding`; its backward delivers ids and output gradients to the private step."""

    @staticmethod
    def forward(ctx, ids, weight, trigger, handle, padding_idx, layout):
        ctx.save_for_backward(ids)
        ctx.rest = (handle, handle.private_step, padding_idx, layout, weight.shape[0])
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        handle, private_step, padding_idx, layout, vocabulary = ctx.rest
        gy = tensor_parallel.arrived(gy)
        ids, gy = batch_tokens(ids, gy, layout, private_step.batch_size)
        gy = without_padding(ids, gy, padding_idx)
        private_step.factors(handle.parameter("weight"), EmbeddingFactors(ids, gy, vocabulary))
        return None, None, None, None, None, None
