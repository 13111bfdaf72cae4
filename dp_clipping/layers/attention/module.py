"""`nn.MultiheadAttention`: projections are uses of linear layers; autograd does the rest."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.layers import projection, tensor_parallel
from dp_clipping.layers.attention.core import Options, attend, merged_mask
from dp_clipping.layers.attention.in_projections import AddBiases, InProjections, RepeatToken
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import FIRST, LayerState, autocast_operands, check_size
from dp_clipping.layers.recorder import Trainable
from dp_clipping.torch_compat import never_compiled, own_parameters

OWN = ("forward", "merge_masks")
WEIGHTS = (
    "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight",
    "bias_k", "bias_v", "out_proj.weight", "out_proj.bias",
)  # fmt: skip


def is_plain(module: nn.Module, kind: type) -> bool:
    """Returns whether a module computes what PyTorch's does, with parameters of its own."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    own = {*own_parameters(module), *(f"out_proj.{n}" for n in own_parameters(module.out_proj))}
    if any(isinstance(attrgetter(name)(module), Tensor) and name not in own for name in WEIGHTS):
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
    layouts = handle.layouts_of(tensors)
    for x, layout in zip(tensors, layouts, strict=True):
        check_size(x, layout, handle, handle.private_step.batch_size)
    of = {id(x): layout for x, layout in zip(tensors, layouts, strict=True)}
    return _run(self, handle, of, *args, **kwargs)


def _run(
    self: nn.MultiheadAttention,
    handle: LayerState,
    layouts: dict[int, Layout],
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
    sequences = layouts[id(query)]
    inputs = [(x, layouts[id(x)]) for x in (query, key, value)]
    q, k, v = (
        x.transpose(0, 1) if self.batch_first else x for x in _projected(self, handle, inputs)
    )
    mask = attn_mask
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = False
    mask = merged_mask(mask, key_padding_mask, self.num_heads, query.dtype)
    if self.bias_k is not None:
        k, v = (
            _with_token(self, handle, k, "bias_k", sequences),
            _with_token(self, handle, v, "bias_v", sequences),
        )
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1))
    dropout = self.dropout if self.training else 0.0
    options = Options(
        self.num_heads, dropout, need_weights, average_attn_weights, self.add_zero_attn
    )
    y, weights = attend(q, k, v, mask, is_causal, options)
    y = y.transpose(0, 1) if self.batch_first else y
    out = self.out_proj
    names = ("out_proj.weight", "out_proj.bias")
    return projection.project(handle, y, sequences, out.weight, out.bias, names=names), weights


def _projected(
    self: nn.MultiheadAttention, handle: LayerState, inputs: list[tuple[Tensor, Layout]]
) -> tuple[Tensor, ...]:
    (query, of_query), (key, of_key), (value, of_value) = inputs
    weight: Any = self.in_proj_weight
    bias: Any = self.in_proj_bias
    if weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        found = [
            projection.project(handle, x, layout, getattr(self, name), None, names=(name, ""))
            for (x, layout), name in zip(inputs, names, strict=True)
        ]
        if bias is None:
            return tuple(found)
        of_all = (of_query, of_key, of_value)
        record, trigger = _record_of(handle, "in_proj_bias")
        of_bias = (record, handle.private_step, of_all)
        return AddBiases.apply(bias.detach(), trigger, of_bias, *found)
    if key is value and query is key:
        both = ("in_proj_weight", "in_proj_bias")
        return projection.project(handle, query, of_query, weight, bias, names=both).chunk(3, -1)
    width = self.embed_dim
    if key is value:
        given, sizes = [inputs[0], inputs[1]], [width, 2 * width]
    else:
        given, sizes = inputs, [width] * 3
    bias = None if bias is None else bias.detach()
    _, weight, bias = autocast_operands(query, weight.detach(), bias)
    xs = [x.to(weight.dtype) for x, _ in given]
    private_step = handle.private_step
    site = handle.site(InProjections, query, FIRST, ("in_proj_weight", "in_proj_bias"))
    trigger = private_step.trigger(site.records[0]) if site.records else None
    rest = (site, private_step, sizes, [layout for _, layout in given])
    found = InProjections.apply(weight, bias, trigger, rest, *xs)
    q, *others = found
    return (q, *others[0].chunk(2, -1)) if key is value else tuple(found)


def _record_of(handle: LayerState, name: str) -> tuple[Trainable | None, Tensor | None]:
    """Returns the record of a parameter and its trigger; None if it is frozen."""
    record = handle.parameters().get(name)
    return record, None if record is None else handle.private_step.trigger(record)


def _with_token(
    self: nn.MultiheadAttention, handle: LayerState, x: Tensor, name: str, sequences: Layout
) -> Tensor:
    """Returns keys or values [S, N, E] with a learned one behind them."""
    token = getattr(self, name).detach().to(x.dtype)
    record, trigger = _record_of(handle, name)
    rest = (record, handle.private_step, Layout(sequences.kind))
    return torch.cat([x, RepeatToken.apply(token, trigger, rest, x.shape[1])])
