"""Embeddings: y = W[ids], so row v of G_i is the sum of output gradients of sample i's tokens v.

Tokens that repeat within a sample add up before the norm is taken: the squared norm is the sum,
over the distinct tokens of the sample, of the squared norm of that sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import Weights, accumulation_dtype, only, squared_norms
from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.embedding import TokenSums
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, check_size, expand_shared


def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, ids)
    call, padding_idx = tensor_parallel.embedding(handle, ids, self.weight, self.padding_idx)
    layout, ids = handle.batched(call.x)
    private_step, weight = handle.private_step, call.weight.detach()
    if handle.keeps_dense():
        place = (layout.kind, layout.dim, private_step.batch_size)
        return call.leave(Dense.apply(ids, weight, handle.slot("weight"), padding_idx, *place))
    trigger = private_step.trigger_of(handle.parameter("weight"))
    return call.leave(Factors.apply(ids, weight, trigger, handle, padding_idx, layout))


def is_plain_bag(module: nn.Module, kind: type) -> bool:
    """Returns whether it is PyTorch's, and adds up rows (`max` picks numbers of several)."""
    if not isinstance(module, nn.EmbeddingBag) or module.mode == "max":
        return False
    return getattr(kind, "forward", None) is nn.EmbeddingBag.forward


def forward_bag(
    self: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Computes bags of ids [N, T]; others are refused when samples are looked for."""
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, input, offsets, per_sample_weights)
    given = [x for x in (input, per_sample_weights) if x is not None]
    tensor_parallel.refuse_distributed(handle, *given, self.weight)
    layouts, private_step = handle.layouts_of(handle.tensors(given)), handle.private_step
    for x, layout in zip(given, layouts, strict=True):
        check_size(x, layout, handle, private_step.batch_size)
    layout = layouts[0]
    if input.dim() != 2 or (layout.dim and layout.kind != "shared") or len(set(layouts)) > 1:
        raise ValueError(
            f"{handle.name or 'the network'} (EmbeddingBag) is given its samples as "
            f"{', '.join(map(str, layouts))}: give it ids, and weights of them, [batch, tokens]"
        )
    if layout.kind == "shared":
        layout = Layout()
        input, *rest = (expand_shared(x, private_step.batch_size) for x in given)
        per_sample_weights = rest[0] if rest else None
    slot = None
    if "weight" in handle.trainable:
        is_dense = handle.keeps_dense()
        slot = (
            handle.slot("weight")
            if is_dense
            else private_step.trigger_of(handle.parameter("weight"))
        )
    how = (self.mode, self.padding_idx, handle if slot is not None and not is_dense else None)
    place = (layout, private_step.batch_size)
    return Bag.apply(input, self.weight.detach(), per_sample_weights, slot, *how, *place)


class Bag(torch.autograd.Function):
    """`F.embedding_bag` of ids [N, T], which in backward delivers G, or ids and output gradients.

    An id's output gradient is that of its bag, times its weight; of a mean, over their number.
    """

    @staticmethod
    def forward(ctx, ids, weight, scales, slot, mode, padding_idx, handle, layout, batch_size):
        ctx.save_for_backward(ids, weight, scales)
        step = None if handle is None else handle.private_step
        ctx.rest = (mode, padding_idx, handle, step, layout, batch_size)
        ctx.slot_dtype = None if slot is None else slot.dtype
        return F.embedding_bag(
            ids, weight, mode=mode, per_sample_weights=scales, padding_idx=padding_idx
        )

    @staticmethod
    def backward(ctx, gy):
        ids, weight, scales = ctx.saved_tensors
        mode, padding_idx, handle, private_step, layout, batch_size = ctx.rest
        gy = tensor_parallel.settled(gy).unsqueeze(1)
        of_scales = gradients = None
        if scales is not None and ctx.needs_input_grad[2]:
            of_scales = without_padding(ids, gy * F.embedding(ids, weight), padding_idx).sum(2)
        if ctx.slot_dtype is None:
            return None, None, of_scales, *[None] * 6
        y = gy.expand(*ids.shape, -1) if scales is None else gy * scales.unsqueeze(2)
        if mode == "mean":
            counted = torch.ones_like(ids) if padding_idx is None else (ids != padding_idx).long()
            y = y / counted.sum(1).clamp(min=1)[:, None, None]
        y = without_padding(ids, y, padding_idx)
        factors = EmbeddingFactors(*batch_tokens(ids, y, layout, batch_size), len(weight))
        if handle is None:
            gradients = factors.dense().to(ctx.slot_dtype)
        else:
            private_step.factors(handle.parameter("weight"), factors)
        return None, None, of_scales, gradients, *[None] * 5


def batch_tokens(ids: Tensor, gy: Tensor, layout: Layout, batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns ids [..] and gy [.., d] -> [B, T] and [B, T, d]."""
    width = gy.shape[-1]
    ids = layout.batch_first(ids, batch_size).reshape(batch_size, -1)
    gy = layout.batch_first(gy, batch_size).reshape(batch_size, -1, width)
    return ids, gy


def without_padding(ids: Tensor, gy: Tensor, padding_idx: int | None) -> Tensor:
    """Returns output gradients [B, T, d] with those of padding tokens zero: they train nothing."""
    if padding_idx is None:
        return gy
    return gy.masked_fill((ids == padding_idx).unsqueeze(-1), 0)


class Dense(torch.autograd.Function):
    """`F.embedding`, which in backward returns G [B, V, d] as the gradient of `slot`."""

    @staticmethod
    def forward(ctx, ids, weight, slot, padding_idx, kind, dim, batch_size):
        ctx.save_for_backward(ids)
        ctx.rest = (padding_idx, kind, dim, batch_size, slot.shape, slot.dtype)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        padding_idx, kind, dim, batch_size, shape, dtype = ctx.rest
        gy = tensor_parallel.settled(gy)
        ids, gy = batch_tokens(ids, gy, Layout(kind, dim), batch_size)
        factors = EmbeddingFactors(ids, without_padding(ids, gy, padding_idx), shape[1])
        return None, None, factors.dense().to(dtype), None, None, None, None


class Factors(torch.autograd.Function):
    """`F.embedding`, which in backward hands ids and output gradients to the private step."""

    @staticmethod
    def forward(ctx, ids, weight, trigger, handle, padding_idx, layout):
        ctx.save_for_backward(ids)
        ctx.rest = (handle, handle.private_step, padding_idx, layout, weight.shape[0])
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        handle, private_step, padding_idx, layout, vocabulary = ctx.rest
        gy = tensor_parallel.settled(gy)
        ids, gy = batch_tokens(ids, gy, layout, private_step.batch_size)
        gy = without_padding(ids, gy, padding_idx)
        private_step.factors(handle.parameter("weight"), EmbeddingFactors(ids, gy, vocabulary))
        return None, None, None, None, None, None


class EmbeddingFactors:
    """Factors of one use: ids [B, T], int32 or int64, y [B, T, d]."""

    def __init__(self, ids: Tensor, y: Tensor, vocabulary: int):
        self.ids, self.y, self.vocabulary = ids.long(), y, vocabulary
        self._sums: tuple[Tensor, Tensor] | None = None

    def norm(self, _grams: object = None) -> Norm:
        """Returns ‖G_i‖² of the sums over equal tokens, which are what `weighted_sum` adds."""
        sums, _ = self._distinct()
        return Norm(squared_norms(sums.view(len(self.ids), -1)))

    def _distinct(self) -> tuple[Tensor, Tensor]:
        """Sums [B·T, d] in `accumulation_dtype(dtype)` over equal tokens of a sample, and their
        tokens [B·T].

        Sorting a sample's ids numbers its distinct tokens without a table of the vocabulary's size;
        rows that no token has are zero.
        """
        if self._sums is None:
            batch_size, tokens = self.ids.shape
            ordered, order = self.ids.sort(dim=1)
            new = torch.ones_like(ordered, dtype=torch.bool)
            new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
            number = torch.empty_like(ordered).scatter_(1, order, new.long().cumsum(1) - 1)
            first = torch.arange(batch_size, device=number.device)[:, None] * tokens
            rows = (number + first).flatten()
            y = self.y.flatten(0, 1).to(accumulation_dtype(self.y.dtype))
            which = torch.zeros_like(rows).scatter_(0, rows, self.ids.flatten())
            self._sums = (y.new_zeros(y.shape).index_add_(0, rows, y), which)
        return self._sums

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Returns Σ_i c_i G_i [V, d] in `accumulation_dtype(dtype)`."""
        sums, which = self._distinct()
        c = weights.values.repeat_interleave(self.ids.shape[1])[:, None]
        return sums.new_zeros(self.vocabulary, sums.shape[1]).index_add_(0, which, sums * c)

    def dense(self) -> Tensor:
        """Returns G [B, V, d] in `accumulation_dtype(dtype)`: the reference implementation."""
        batch_size, tokens = self.ids.shape
        y = self.y.to(accumulation_dtype(self.y.dtype))
        total = y.new_zeros(batch_size, self.vocabulary, y.shape[-1])
        sample = torch.arange(batch_size, device=y.device)[:, None].expand(batch_size, tokens)
        return total.index_put_((sample, self.ids), y, accumulate=True)

    def on_kernels(self) -> TokenSums:
        """Returns the sums over equal tokens, formed on kernels."""
        return TokenSums.of(self.ids, self.y)

    def only(self, good: Tensor) -> "EmbeddingFactors":
        """Returns zeros for the samples that are not `good` [B]."""
        return EmbeddingFactors(self.ids, only(self.y, good), self.vocabulary)
