"""`nn.MultiheadAttention`, and with it the layers of `nn.Transformer`.

Projections are uses of linear layers. Between them attention is computed as
`F.multi_head_attention_forward` does, which also projects, with its own parameters. Autograd does
the rest. Modules with `kdim`, `vdim` or `add_bias_kv` have other parameters, and run under vmap.
"""

import math
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.layers import projection, tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState
from dp_clipping.torch_compat import never_compiled, own_parameters

OWN = ("forward", "merge_masks")
IN, OUT = ("in_proj_weight", "in_proj_bias"), ("out_proj.weight", "out_proj.bias")
OTHERS = ("q_proj_weight", "bias_k")  # parameters that only some modules have


def is_plain(module: nn.Module, kind: type) -> bool:
    """Returns whether a module computes what PyTorch's does, with parameters of its own."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    if any(getattr(module, name, None) is not None for name in OTHERS):
        return False
    own = {*own_parameters(module), *(f"out_proj.{n}" for n in own_parameters(module.out_proj))}
    weights = {name: attrgetter(name)(module) for name in (*IN, *OUT)}
    if any(value is not None and name not in own for name, value in weights.items()):
        return False  # a hook computes a weight of other parameters
    parametrized = (nn.utils.parametrize.is_parametrized(m) for m in module.modules())
    same = all(getattr(kind, name) is getattr(nn.MultiheadAttention, name) for name in OWN)
    return same and not any(parametrized) and "forward" not in vars(module.out_proj)


@never_compiled
def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
    handle: Any = self._private
    if handle.private_step is None:
        return type(self).forward(self, *args, **kwargs)
    tensors = handle.tensors((args, kwargs))
    tensor_parallel.refuse_distributed(handle, *tensors, *self.parameters())
    return _run(self, handle, handle.layouts_of(tensors)[0], *args, **kwargs)


def _run(
    self: nn.MultiheadAttention,
    handle: LayerState,
    sequences: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint: give attn_mask too")
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if is_causal else attn_mask
    mask = _merged_mask(mask, key_padding_mask, self.num_heads, query.dtype)
    q, k, v = _projected(self, handle, sequences, query, key, value)
    if not self.batch_first:
        q, k, v = [x.transpose(0, 1) for x in (q, k, v)]
    y, weights = _attend(self, q, k, v, mask, is_causal, need_weights)
    y = y if self.batch_first else y.transpose(0, 1)
    y = projection.project(
        handle, y, sequences, self.out_proj.weight, self.out_proj.bias, names=OUT
    )
    return y, weights.mean(1) if weights is not None and average_attn_weights else weights


def _projected(
    self: nn.MultiheadAttention, handle: LayerState, sequences: Layout, query: Tensor, key: Tensor,
    value: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns queries, keys and values, whose weights are rows of one.

    Tokens of several inputs are those of one use of that weight: it computes all rows of each, so
    that the gradient is zero in those that are not used.
    """
    inputs = [query] if query is key is value else [query, key]
    inputs = inputs if key is value else [query, key, value]
    time = 1 if self.batch_first else 0
    x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, time)
    y = projection.project(handle, x, sequences, self.in_proj_weight, self.in_proj_bias, names=IN)
    if len(inputs) == 1:
        return y.chunk(3, -1)
    of_query, *others = y.split([one.shape[time] for one in inputs], time)
    (q, _, _), (_, k, _), (_, _, v) = (
        x.chunk(3, -1) for x in (of_query, others[0], others[-1])
    )  # fmt: skip
    return q, k, v


def _attend(
    self: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns attention [N, L, E] and, if they are needed, its weights [N, heads, L, S].

    The gradient that comes back to it lies in memory as `q` does. cuDNN's backward (torch 2.11, 16
    bit) is planned once for operands that lie as these do, whatever the next gradient's strides.

    Args:
        q, k, v: [N, L, E] and [N, S, E], projected.
        mask: the mask of `_merged_mask`, [1, L, S] or [N · heads, L, S].
    """
    dropout = self.dropout if self.training else 0.0
    q, k, v = [_by_head(x, self.num_heads) for x in (q, k, v)]
    if self.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))
    if not need_weights:
        if mask is not None:
            mask = mask.view(-1, self.num_heads, *mask.shape[1:]) if len(mask) > 1 else mask[None]
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return y.transpose(1, 2).flatten(2), None
    shape = q.shape[:2]
    q, k, v = [x.flatten(0, 1) for x in (q * math.sqrt(1.0 / q.shape[3]), k, v)]
    scores = torch.bmm(q, k.mT) if mask is None else torch.baddbmm(mask, q, k.mT)
    weights = F.dropout(scores.softmax(-1), dropout)
    y = torch.bmm(weights, v).unflatten(0, shape).transpose(1, 2).flatten(2)
    return y, weights.unflatten(0, shape)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Returns [N, T, E] as [N, heads, T, E / heads]."""
    count, length, width = x.shape
    return x.reshape(count, length, heads, width // heads).transpose(1, 2)


def _merged_mask(
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
