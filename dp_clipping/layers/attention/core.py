"""Attention between its projections, as `F.multi_head_attention_forward` computes it.

That function also projects, with its own parameters, which cannot be replaced.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.layers.batch_layout import Layout


def fits(batch_first: bool, known: dict[tuple[int, ...], tuple[Layout, ...]]) -> bool:
    """Returns whether each sample has sequences of its own in all calls that were seen.

    Else the module is run under vmap. `known`: see `LayerState.layouts`.
    """
    dim = 0 if batch_first else 1
    return all(
        dims[:3] == (3, 3, 3) and all(x.kind != "shared" and x.dim == dim for x in layouts[:3])
        for dims, layouts in known.items()
    )


@dataclass(frozen=True)
class Options:
    """Options of attention; see `nn.MultiheadAttention`.

    Attributes:
        dropout: 0 outside of training.
    """

    heads: int
    dropout: float
    need_weights: bool
    average_weights: bool
    add_zeros: bool


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Returns attention [L, N, E] and, if they are needed, its weights [N, L, S] or by head.

    Args:
        q, k, v: [L, N, E] and [S, N, E], projected.
        mask: the mask of `merged_mask`, [1, L, S] or [N · heads, L, S].
    """
    length, count, width = q.shape
    q, k, v = (_by_head(x, options.heads) for x in (q, k, v))
    if options.add_zeros:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))
    if not options.need_weights:
        if mask is not None:
            mask = mask.view(-1, options.heads, *mask.shape[1:]) if len(mask) > 1 else mask[None]
        q, k, v = (x.unflatten(0, (count, options.heads)) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, options.dropout, is_causal)
        return y.permute(2, 0, 1, 3).reshape(length, count, width), None
    q = q * math.sqrt(1.0 / q.shape[2])
    scores = torch.bmm(q, k.mT) if mask is None else torch.baddbmm(mask, q, k.mT)
    weights = F.dropout(scores.softmax(-1), options.dropout)
    y = torch.bmm(weights, v).transpose(0, 1).reshape(length, count, width)
    weights = weights.unflatten(0, (count, options.heads))
    return y, weights.mean(1) if options.average_weights else weights


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Returns [T, N, E] as [N · heads, T, E / heads]."""
    return x.reshape(len(x), x.shape[1] * heads, x.shape[2] // heads).transpose(0, 1)


def merged_mask(
    mask: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Returns the mask that is added to scores, [1, L, S] or [N · heads, L or 1, S].

    Args:
        mask: [L, S] or [N · heads, L, S], numbers that are added, or True where none may look.
        padding: [N, S], of keys, likewise.
    """
    found = None
    if mask is not None:
        found = _added(mask, dtype)
        found = found.unsqueeze(0) if found.dim() == 2 else found
    if padding is not None:
        padding = _added(padding, dtype).repeat_interleave(heads, 0).unsqueeze(1)
        found = padding if found is None else found + padding
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
