"""`nn.EmbeddingBag`: sums and means over ids, [batch, tokens] or concatenated with offsets.

An id's output gradient is that of its bag, times its weight; of a mean, over the number of ids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.embedding.factors import EmbeddingFactors, batch_tokens, without_padding
from dp_clipping.layers.embedding.ragged import RaggedFactors
from dp_clipping.layers.handle import LayerState, check_size, expand_shared


def is_plain(module: nn.Module, kind: type) -> bool:
    """Returns whether a module is PyTorch's and adds up rows (`max` picks numbers of several)."""
    if not isinstance(module, nn.EmbeddingBag) or module.mode == "max":
        return False
    return getattr(kind, "forward", None) is nn.EmbeddingBag.forward


def forward(
    self: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Computes bags of ids [N, T], or of ids [N] with the offsets of one bag for each sample."""
    handle: LayerState = self._private
    if handle.private_step is None:
        return type(self).forward(self, input, offsets, per_sample_weights)
    given = [x for x in (input, per_sample_weights) if x is not None]
    tensor_parallel.refuse_distributed(handle, *given, self.weight)
    if input.dim() == 1:
        return _with_offsets(self, handle, input, offsets, per_sample_weights)
    layouts, private_step = handle.layouts_of(given), handle.private_step
    for x, layout in zip(given, layouts, strict=True):
        check_size(x, layout, handle, private_step.batch_size)
    layout = layouts[0]
    if input.dim() != 2 or (layout.dim and layout.kind != "shared") or len(set(layouts)) > 1:
        raise ValueError(
            f"{handle.name or 'the network'} (EmbeddingBag) is given its samples as "
            f"{', '.join(map(str, layouts))}: give it ids, and weights of them, [batch, tokens]"
        )
    if layout.kind == "shared":
        layout = handle.layout_of_rows
        input, *rest = (expand_shared(x, handle.rows) for x in given)
        per_sample_weights = rest[0] if rest else None
    slot, receiver = _slot_of(handle)
    how = (self.mode, self.padding_idx, receiver)
    place = (layout, private_step.batch_size)
    return Bag.apply(input, self.weight.detach(), per_sample_weights, slot, *how, *place)


def _slot_of(handle: LayerState) -> tuple[Tensor | None, LayerState | None]:
    """Returns an input that makes autograd call the backward, and the receiver of factors.

    If the receiver is None, G is the gradient of the input. Both are None if the weight is frozen.
    """
    if "weight" not in handle.trainable:
        return None, None
    if handle.keeps_dense():
        return handle.slot("weight"), None
    return handle.parameter("weight").trigger, handle


def _with_offsets(
    self: nn.EmbeddingBag, handle: LayerState, ids: Tensor, offsets: Tensor, scales: Tensor | None
) -> Tensor:
    """Computes concatenated bags; `capture.samples` assigns them to samples."""
    private_step = handle.private_step
    if self.include_last_offset and int(offsets[-1]) != len(ids):
        raise ValueError(  # PyTorch takes some of the others for ids of the last bag
            f"{handle.name or 'the network'} (EmbeddingBag) has include_last_offset=True, and its "
            f"last offset is {int(offsets[-1])} for {len(ids)} ids: let it be their number"
        )
    tensors = handle.tensors(((ids, offsets, scales), {}))
    layouts = handle.layouts_of(tensors)
    for x, layout in zip(tensors, layouts, strict=True):
        check_size(x, layout, handle, private_step.batch_size)
    if set(layouts) != {handle.layout_of_rows}:
        raise ValueError(
            f"{handle.name or 'the network'} (EmbeddingBag) is given offsets whose samples are "
            f"{', '.join(map(str, layouts))}: give it one bag for each sample of the batch"
        )
    slot, receiver = _slot_of(handle)
    how = (self.mode, self.padding_idx, self.include_last_offset, receiver)
    sizes = private_step.batch_size, handle.examples_per_unit
    return RaggedBag.apply(ids, offsets, self.weight.detach(), scales, slot, *how, *sizes)


class Bag(torch.autograd.Function):
    """Runs `F.embedding_bag` on ids [N, T]; its backward delivers G, or ids and output gradients.

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
        gy = tensor_parallel.arrived(gy).unsqueeze(1)
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


class RaggedBag(torch.autograd.Function):
    """Runs `F.embedding_bag` on ids [N] with offsets, `each` bags per sample; see `Bag`."""

    @staticmethod
    def forward(
        ctx, ids, offsets, weight, scales, slot, mode, padding_idx, has_last, handle, batch_size,
        each,
    ):  # fmt: skip
        ctx.save_for_backward(ids, offsets, weight, scales)
        step = None if handle is None else handle.private_step
        ctx.rest = (mode, padding_idx, has_last, handle, step, batch_size, each)
        ctx.slot_dtype = None if slot is None else slot.dtype
        return F.embedding_bag(
            ids, weight, offsets, mode=mode, per_sample_weights=scales,
            include_last_offset=has_last, padding_idx=padding_idx,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, gy):
        ids, offsets, weight, scales = ctx.saved_tensors
        mode, padding_idx, has_last, handle, private_step, batch_size, each = ctx.rest
        bags = bags_of(ids, offsets, has_last)
        y = tensor_parallel.arrived(gy)[bags]
        of_scales = gradients = None
        if scales is not None and ctx.needs_input_grad[3]:
            of_scales = without_padding(ids, y * F.embedding(ids, weight), padding_idx).sum(1)
        if ctx.slot_dtype is None:
            return None, None, None, of_scales, *[None] * 7
        if scales is not None:
            y = y * scales.unsqueeze(1)
        if mode == "mean":
            counted = torch.ones_like(ids) if padding_idx is None else (ids != padding_idx).long()
            counts = torch.zeros(batch_size * each, dtype=torch.long, device=ids.device)
            counts = counts.index_add(0, bags, counted.long())
            y = y / counts.clamp(min=1)[bags].unsqueeze(1)
        y = without_padding(ids, y, padding_idx)
        factors = RaggedFactors(ids, bags // each, y, batch_size, len(weight))
        if handle is None:
            gradients = factors.dense().to(ctx.slot_dtype)
        else:
            private_step.factors(handle.parameter("weight"), factors)
        return None, None, None, of_scales, gradients, *[None] * 6


def bags_of(ids: Tensor, offsets: Tensor, has_last: bool) -> Tensor:
    """Returns the number of the bag that each of ids [N] is in, [N]."""
    starts = offsets[1:-1] if has_last else offsets[1:]
    places = torch.arange(len(ids), device=ids.device, dtype=offsets.dtype)
    return torch.searchsorted(starts.contiguous(), places, right=True)
