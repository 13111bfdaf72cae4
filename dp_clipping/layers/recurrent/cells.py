"""One time step of LSTM, GRU and RNN, forward and backward.

A step gets the input's share of the gates, i = W_ih x + b_ih, and that of the state before it,
k = W_hh h + b_hh. Backward returns the gradients of i and of k: all that per-sample gradients need.
They differ in the new gate of a GRU only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.distributed.dtensor import plain_type
from dp_clipping.torch_compat import own_parameters

OWN = ("forward", "permute_hidden")


def is_plain(module: nn.Module) -> bool:
    """Returns whether it computes what PyTorch's does, with parameters of its own."""
    kind: Any = plain_type(module)
    base = next((base for base in (nn.LSTM, nn.GRU, nn.RNN) if issubclass(kind, base)), None)
    if base is None or nn.utils.parametrize.is_parametrized(module):
        return False
    own = set(map(id, own_parameters(module).values()))
    if not all(id(weight) in own for layer in module.all_weights for weight in layer):
        return False  # a hook computes a weight of other parameters
    return all(getattr(kind, name) is getattr(base, name) for name in OWN)


@dataclass(frozen=True)
class StepGradients:
    """Gradients that one time step passes on.

    Attributes:
        of_input, of_hidden: of i and k, [N, gates · H].
        state: of the last state h, besides what comes through k; None: there is no such.
        cell: of the last cell state c; None: there is none.
    """

    of_input: Tensor
    of_hidden: Tensor
    state: Tensor | None = None
    cell: Tensor | None = None


class Lstm:
    """Hochreiter and Schmidhuber 1997, with a forget gate.

    input, forget, output gates i, f, o and candidate g:  c' = f c + i g,  h' = o tanh(c').
    """

    gates, saved = 4, 4

    def step(self, i: Tensor, k: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what backward needs [N, saved · H], h' and c'."""
        activated = i + k
        inputs_and_forgets, candidate, outputs = self._split(activated)
        inputs_and_forgets.sigmoid_()
        candidate.tanh_()
        outputs.sigmoid_()
        admitted, kept = inputs_and_forgets.chunk(2, 1)
        c = torch.addcmul(kept * c, admitted, candidate)
        return activated, outputs * c.tanh(), c

    def backward(
        self, activated: Tensor, h: Tensor, c: Tensor, gh: Tensor, gc: Tensor
    ) -> StepGradients:
        """Returns the gradients; h and c are the states before the step."""
        admitted, kept, candidate, outputs = activated.chunk(4, 1)
        tanh = torch.addcmul(kept * c, admitted, candidate).tanh()
        gc = torch.addcmul(gc, gh * outputs, 1 - tanh * tanh)
        gates = torch.cat((gc * candidate, gc * c, gc * admitted, gh * tanh), 1)
        # σ' = σ (1 - σ), tanh' = 1 - tanh²
        inputs_and_forgets, g, o = self._split(gates)
        both, _, _ = self._split(activated)
        inputs_and_forgets.mul_(both * (1 - both))
        g.mul_(1 - candidate * candidate)
        o.mul_(outputs * (1 - outputs))
        return StepGradients(gates, gates, cell=gc * kept)

    def hidden(self, activated: Tensor, c: Tensor) -> Tensor:
        """Returns h' of all time steps again, before a projection."""
        admitted, kept, candidate, outputs = activated.chunk(4, -1)
        return outputs * torch.addcmul(kept * c, admitted, candidate).tanh()

    @staticmethod
    def _split(x: Tensor) -> tuple[Tensor, ...]:
        width = x.shape[1] // 4
        return x.split((2 * width, width, width), 1)


class Gru:
    """Cho et al. 2014, as cuDNN has it, with reset gate r and update gate z.

    n = tanh(i_n + r k_n),  h' = (1 - z) n + z h.
    """

    gates, saved = 3, 4

    def step(self, i: Tensor, k: Tensor, h: Tensor, c: None) -> tuple[Tensor, Tensor, None]:
        width = h.shape[1]
        both = (i[:, : 2 * width] + k[:, : 2 * width]).sigmoid()
        reset, update = both.chunk(2, 1)
        new = torch.addcmul(i[:, 2 * width :], reset, k[:, 2 * width :]).tanh()
        return torch.cat((both, new, k[:, 2 * width :]), 1), torch.lerp(new, h, update), None

    def backward(
        self, activated: Tensor, h: Tensor, c: None, gh: Tensor, gc: None
    ) -> StepGradients:
        reset, update, new, of_hidden = activated.chunk(4, 1)
        g_new = gh * (1 - update) * (1 - new * new)
        g_update = gh * (h - new) * update * (1 - update)
        g_reset = g_new * of_hidden * reset * (1 - reset)
        return StepGradients(
            torch.cat((g_reset, g_update, g_new), 1),
            torch.cat((g_reset, g_update, g_new * reset), 1),
            state=gh * update,
        )


class Rnn:
    """Elman 1990: h' = tanh(i + k), or relu(i + k)."""

    gates, saved = 1, 1

    def __init__(self, nonlinearity: str):
        self.nonlinearity = nonlinearity

    def step(self, i: Tensor, k: Tensor, h: Tensor, c: None) -> tuple[Tensor, Tensor, None]:
        h = (i + k).tanh() if self.nonlinearity == "tanh" else (i + k).relu()
        return h, h, None

    def backward(
        self, activated: Tensor, h: Tensor, c: None, gh: Tensor, gc: None
    ) -> StepGradients:
        if self.nonlinearity == "tanh":
            gates = gh * (1 - activated * activated)
        else:
            gates = torch.where(activated > 0, gh, 0)
        return StepGradients(gates, gates)


Cell = Lstm | Gru | Rnn
