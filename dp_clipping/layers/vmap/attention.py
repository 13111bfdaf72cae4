"""Runs attention of a module under vmap outside of vmap, on the whole batch.

Under `torch.vmap` PyTorch does not notice that a mask (a relative position bias) needs a gradient,
and chooses a kernel without one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dp_clipping.torch_compat import Vmap, current_vmap, outside_of_vmap


class BatchedAttention(TorchFunctionMode):
    """A context: under vmap `F.scaled_dot_product_attention` computes what it does without."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:  # what it calls does not come here
            with sdpa_kernel(SDPBackend.MATH):
                return function(*args, **kwargs)
        if function is not F.scaled_dot_product_attention or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        vmap = current_vmap() if query.dim() > 2 else None
        if vmap is None:
            return function(*args, **kwargs)
        return _of_all_samples(vmap, *args, **kwargs)


def _of_all_samples(
    vmap: Vmap, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Returns attention of one sample's query [.., L, E] in `vmap`, from that of all samples."""
    outer = query.shape[:-3]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*outer, *(1,) * (3 - attn_mask.dim()), *attn_mask.shape[-3:])
    operands = [None if x is None else vmap.unwrap(x) for x in (query, key, value, attn_mask)]
    with outside_of_vmap():
        rows: list[Any] = [x if x is None else _rows(*x, vmap.batch_size) for x in operands]
        found = F.scaled_dot_product_attention(*rows, *args, **kwargs)
        found = found.unflatten(0, (vmap.batch_size, *outer))
    return vmap.wrap(found)


def _rows(x: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """Returns [N, heads, L, E] from that of all samples, or of each."""
    x = x.expand(batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, -4)
