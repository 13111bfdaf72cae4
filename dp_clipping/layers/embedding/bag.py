"""`nn.EmbeddingBag`: sums and means over ids, [batch, tokens] or concatenated with offsets.

An id's output gradient is that of its bag, times its weight; of a mean, over the number of ids.
"""

from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout, expand_shared
from dp_clipping.layers.embedding.module import EmbeddingFactors, by_sample, without_padding
from dp_clipping.layers.handle import FIRST, LayerState, forward_of
from dp_clipping.layers.recorder import FACTORS

SETTINGS = attrgetter("mode", "padding_idx")


def is_plain(module: nn.Module, kind: type) -> bool:
    """Returns whether a module is PyTorch's and adds up rows (`max` picks numbers of several)."""
    if not isinstance(module, nn.EmbeddingBag) or module.mode == "max":
        return False
    return getattr(kind, "forward", None) is nn.EmbeddingBag.forward


def _first_call(
    self: nn.EmbeddingBag,
    handle: LayerState,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Computes bags of ids [N, T], or of ids [N] with the offsets of one bag for each sample.

    `capture.samples` assigns concatenated bags to samples. The last bag has all ids from its offset
    on, whatever a last offset says. That this is their number is looked at in batches that are
    checked: the host waits for it on a GPU.
    """
    scales, private_step = per_sample_weights, handle.private_step
    given = [x for x in (input, scales) if x is not None]
    tensor_parallel.refuse_distributed(handle, *given, self.weight)
    is_flat = input.dim() == 1
    has_last = is_flat and self.include_last_offset
    if has_last and private_step.is_looked_at and int(offsets[-1]) != len(input):
        raise ValueError(  # PyTorch takes some of the others for ids of the last bag
            f"{handle.title(self)} has include_last_offset=True, and its last offset is "
            f"{int(offsets[-1])} for {len(input)} ids: let it be their number"
        )
    tensors = handle.tensors(((input, offsets, scales), {}))
    layouts = handle.layouts_of(tensors)
    layout = layouts[0]
    if is_flat and set(layouts) != {handle.layout_of_rows}:
        raise ValueError(
            f"{handle.title(self)} is given offsets whose samples are "
            f"{', '.join(map(str, layouts))}: give it one bag for each sample of the batch"
        )
    is_inner = layout.dim and layout.kind != "shared"
    if not is_flat and (input.dim() != 2 or is_inner or len(set(layouts)) > 1):
        raise ValueError(
            f"{handle.title(self)} is given its samples as {', '.join(map(str, layouts))}: give it "
            "ids, and weights of them, [batch, tokens]"
        )
    if layout.kind == "shared":
        layout = handle.layout_of_rows
        input, *rest = (expand_shared(x, handle.rows) for x in given)
        scales = rest[0] if rest else None
    layout, settings = FIRST if is_flat else layout, SETTINGS(self)
    options = (*settings, handle.examples_per_unit)
    if torch.compiler.is_compiling():
        slot = handle.slot("weight")
        rest = (None, (layout.kind, layout.dim, private_step.batch_size), options)
    else:
        site = handle.site(Bag, input, layout, options=options, settings=settings, reads=SETTINGS)
        slot = private_step.trigger(site.records[0])
        rest = (site, private_step, options)
        if not is_flat and scales is None:
            handle.keep(input, site)
    offsets = offsets[:-1] if has_last else offsets
    return Bag.apply(input, self.weight.detach(), offsets, slot, scales, rest)


forward = forward_of("embedding_bag", _first_call)


class Bag(torch.autograd.Function):
    """Runs `F.embedding_bag`; its backward leaves ids and their output gradients.

    `rest` has the site, the private step and options. In a compiled region it has None and where
    samples are: there backward returns G [B, V, d] as the gradient of the slot.
    """

    @staticmethod
    def forward(ctx, ids, weight, offsets, slot, scales, rest):
        ctx.save_for_backward(ids, offsets, scales, None if scales is None else weight)
        ctx.vocabulary = weight.shape[0]
        ctx.rest, ctx.slot_dtype = rest, slot.dtype
        mode, padding_idx, _ = rest[2]
        return F.embedding_bag(
            ids, weight, offsets, mode=mode, per_sample_weights=scales, padding_idx=padding_idx
        )

    @staticmethod
    def backward(ctx, gy):
        ids, offsets, scales, weight = ctx.saved_tensors
        site, private_step, (mode, padding_idx, each) = ctx.rest
        gy = tensor_parallel.arrived(gy)
        bags = None if offsets is None else bags_of(ids, offsets)
        y = gy.unsqueeze(1) if bags is None else gy[bags]  # [N, 1, d], or [ids, d]
        of_scales = None
        if scales is not None and ctx.needs_input_grad[4]:
            of_scales = without_padding(ids, y * F.embedding(ids, weight), padding_idx).sum(-1)
        if scales is not None:
            y = y * scales.unsqueeze(-1)
        else:
            if mode == "mean" and bags is None and padding_idx is None:
                y = y / max(1, ids.shape[1])
            elif mode == "mean":
                y = y / _sizes(ids, bags, gy.shape[0], padding_idx)
            if bags is None:
                y = y.expand(-1, ids.shape[1], -1)
        if padding_idx is not None:
            y = without_padding(ids, y, padding_idx)
        if site is None:
            kind, dim, batch_size = private_step
            layout = Layout(kind, dim)
        else:
            layout, batch_size = site.layout, private_step.batch_size
        if bags is None:
            if layout is not None or ids.shape[0] != batch_size:
                ids, y = by_sample(ids, y, layout, batch_size)
            factors = EmbeddingFactors(ids, y, ctx.vocabulary)
        else:
            factors = EmbeddingFactors(ids, y, ctx.vocabulary, bags // each, batch_size)
        if site is None:
            gradients = factors.dense().to(ctx.slot_dtype)
            return None, None, None, gradients, of_scales, None
        private_step.take(FACTORS, site.records, factors, factors.held(factors))
        return None, None, None, None, of_scales, None


def _sizes(ids: Tensor, bags: Tensor | None, count: int, padding_idx: int | None) -> Tensor:
    """Returns how many ids the bag of each id has, without padding: [N, 1, 1], or [ids, 1]."""
    counted = torch.ones_like(ids) if padding_idx is None else (ids != padding_idx).long()
    if bags is None:
        return counted.sum(1).clamp(min=1)[:, None, None]
    sizes = torch.zeros(count, dtype=torch.long, device=ids.device)
    sizes = sizes.index_add(0, bags, counted.long())
    return sizes.clamp(min=1)[bags].unsqueeze(1)


def bags_of(ids: Tensor, offsets: Tensor) -> Tensor:
    """Returns the number of the bag that each of ids [N] is in, [N], from where each begins."""
    places = torch.arange(len(ids), device=ids.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), places, right=True)
