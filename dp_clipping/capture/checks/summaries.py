"""Summarises each sample's values in a tensor by a few numbers, to compare two runs.

A summary of a tensor with B samples is [B, SIGNS + 1]: each sample's sum under several fixed random
signs, and its norm. Two samples of different values have different sums but for chance.
"""

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import available
from dp_clipping.kernels.signed_sums import SIGNS, signed_sums, signed_sums_plain
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.trials.seen import Summary
from dp_clipping.trials.tolerances import BESIDE, WHOLE


def summary(x: Tensor, layout: Layout, batch_size: int) -> Summary:
    """Returns each sample's values in x."""
    is_float = x.is_floating_point() or x.is_complex()
    tolerance = BESIDE.of(x.dtype) if is_float else WHOLE
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    if not x.numel():
        return Summary(x.new_zeros(batch_size, SIGNS + 1, dtype=torch.float64), tolerance)
    rows = layout.batch_first(x, batch_size)
    shape = tuple(rows.shape[1:])
    rows = rows.reshape(batch_size, -1)
    if rows.is_cuda and available(rows.device, rows.dtype):
        return Summary(signed_sums(rows), tolerance, shape)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32) if is_float else torch.float64)
    return Summary(signed_sums_plain(rows), tolerance, shape)
