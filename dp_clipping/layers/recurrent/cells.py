"""`nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`: one time step, called in the user's loop.

The products of input and state with the gates' weights are linear layers, and each call is a use.
Autograd does the rest. Factors of all uses of a weight are joined (`recorder.Joint`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.layers import projection, tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState
from dp_clipping.torch_compat import never_compiled


@never_compiled
def forward(self: nn.RNNCellBase, input: Tensor, hx: Any = None) -> Any:
    """Computes the module: the new state, and of an LSTM the new cell state too."""
    handle: Any = self._private
    if handle.private_step is None:
        return type(self).forward(self, input, hx)
    is_lstm = isinstance(self, nn.LSTMCell)
    layout = _layout(self, handle, input, hx)
    i = projection.project(
        handle, input, layout, self.weight_ih, self.bias_ih, names=("weight_ih", "bias_ih")
    )
    if hx is None:
        hx = i.new_zeros(len(i), self.hidden_size)
        hx = (hx, hx) if is_lstm else hx
    h, c = hx if is_lstm else (hx, hx)
    k = projection.project(
        handle, h, layout, self.weight_hh, self.bias_hh, names=("weight_hh", "bias_hh")
    )
    with torch.autocast(i.device.type, enabled=False):
        if is_lstm:
            return lstm(i, k, c)
        if isinstance(self, nn.GRUCell):
            return gru(i, k, h)
        return (i + k).tanh() if self.nonlinearity == "tanh" else (i + k).relu()


def _layout(self: nn.RNNCellBase, handle: LayerState, input: Tensor, hx: Any) -> Layout:
    """Returns where the samples are among the rows.

    Raises:
        ValueError: rows of the input and of the states are not of the same samples.
    """
    tensors = handle.tensors((input, hx))
    tensor_parallel.refuse_distributed(handle, *tensors, *self.parameters())
    layouts = handle.layouts_of(tensors)
    for x, layout in zip(tensors, layouts, strict=True):
        if x.dim() != 2 or layout != layouts[0] or layout.kind == "shared" or layout.dim:
            raise ValueError(
                f"{handle.title(self)} is given a tensor of "
                f"shape {tuple(x.shape)} with its samples as {layout}: give it [batch, features], "
                "and states [batch, features] with a row of their own for every sample (x.expand)"
            )
    return layouts[0]


def lstm(i: Tensor, k: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Returns h' = o tanh(c') and c' = f c + i g [N, H], of the gates' shares [N, 4H]."""
    admit, keep, new, out = (i + k).chunk(4, 1)
    c = keep.sigmoid() * c + admit.sigmoid() * new.tanh()
    return out.sigmoid() * c.tanh(), c


def gru(i: Tensor, k: Tensor, h: Tensor) -> Tensor:
    """Returns h' = (1 - z) n + z h with n = tanh(i_n + r k_n), of the gates' shares [N, 3H]."""
    (i_r, i_z, i_n), (k_r, k_z, k_n) = i.chunk(3, 1), k.chunk(3, 1)
    z, n = (i_z + k_z).sigmoid(), (i_n + (i_r + k_r).sigmoid() * k_n).tanh()
    return n + z * (h - n)
