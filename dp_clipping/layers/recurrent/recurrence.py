"""Computes per-sample gradients of a recurrent layer's weights from its backward.

Two functions that compute nothing surround the kernel: `Enter` before it, on the inputs' share X of
the gates, and `Leave` after it. In backward `Leave` runs first and saves the states of all time
steps, then the kernel's backward runs, and `Enter` gets G, the gradient at the gates. Per-sample
gradients of the weights that the kernel has read are products over the time steps t:

    W_hh    Σ_t k_t h_{t-1}ᵀ    k: gradient of W_hh h + b_hh, which is G. In a GRU the new gate
    b_hh    Σ_t k_t             multiplies it with the reset gate r: G_n r there

r is computed again from X and the states: one product for all time steps.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.handle import Site
from dp_clipping.layers.recorder import LINEAR
from dp_clipping.layers.recurrent.kernel import Weights
from dp_clipping.layers.recurrent.packing import Packing


@dataclass(frozen=True)
class Part:
    """The parameters of one layer in one direction.

    Attributes:
        names: of W_ih, b_ih, W_hh and b_hh, whether it has them or not.
        input, hidden: the sites of W_ih and b_ih, and of W_hh and b_hh.
    """

    names: list[str]
    input: Site
    hidden: Site


class Layer:
    """One layer of a module, which all runs of it share.

    Args:
        mode: the mode of `nn.RNNBase`.
        parts: its directions; where the samples are in dimension 1 is their sites'.

    Attributes:
        records: parameters, one for each use that makes autograd visit `Enter`.
        reads_gates: backward needs X and the weights.
    """

    def __init__(self, mode: str, parts: list[Part]):
        self.mode, self.parts = mode, parts
        self.records = [part.hidden.records[0] for part in parts if part.hidden.records]
        self.reads_gates = mode == "GRU"


class Run:
    """One run of the kernel, on N sequences.

    Args:
        layer: the layer that is run.
        private_step: takes what backward leaves.
        packing: the packing of the sequences; None: they are of one length.
    """

    def __init__(self, layer: Layer, private_step: Any, packing: Packing | None):
        self.layer, self.private_step, self.packing = layer, private_step, packing
        # h of all time steps [T, N, D·H], and the first ones [D, N, H], between the two backwards
        self.states: tuple[Tensor, Tensor] | None = None

    def announce(self, gates: Tensor, weights: list[Weights]) -> None:
        """Tells the step which products the kernel will compute; `gates`: X of one direction."""
        for part, (weight, _) in zip(self.layer.parts, weights, strict=True):
            if part.hidden.planned is not None:
                shape = torch.Size((*gates.shape[:2], weight.shape[1]))
                call = (part.hidden.planned, shape, gates.dtype, weight.shape[0])
                self.private_step.plans.calls.append(call)

    def deliver(self, g: Tensor, gates: Tensor | None, weights: list[Any]) -> None:
        """Leaves the factors that G [T, N, D·gates·H] and the states give.

        Args:
            gates: X, if the layer reads it.
            weights: then also W_hh and b_hh of each direction, of the dtype of G.
        """
        assert self.states is not None, "Leave's backward comes before Enter's"
        (outputs, first), self.states = self.states, None
        count = len(self.layer.parts)
        for n, part in enumerate(self.layer.parts):
            hidden, k = part.hidden, g.chunk(count, 2)[n]
            if not hidden.records:
                continue
            before = self._before(outputs.chunk(count, 2)[n], first[n], reverse=bool(n))
            if gates is not None:
                k = _of_hidden(k, gates.chunk(count, 2)[n], before, *weights[2 * n : 2 * n + 2])
            self.private_step.take(LINEAR, hidden.records, (k, before, hidden), (k, before))

    def _before(self, outputs: Tensor, first: Tensor, reverse: bool) -> Tensor:
        """Returns the state [T, N, H] before each time step of one direction."""
        if not reverse:
            return torch.cat([first[None], outputs[:-1]])
        if self.packing is None:
            return torch.cat([outputs[1:], first[None]])
        before = F.pad(outputs[1:], (0, 0, 0, 0, 0, 1))
        before[self.packing.ends, torch.arange(len(first), device=first.device)] = first
        return before


def _of_hidden(
    g: Tensor, gates: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Returns the gradient of W_hh h + b_hh in a GRU, of G and X of one direction."""
    width = before.shape[2]
    bias = None if bias is None else bias[:width]
    wide = accumulation_dtype(gates.dtype)
    reset = F.linear(before, weight[:width], bias).to(wide) + gates[..., :width]
    k = g.clone()
    k[..., 2 * width :].mul_(reset.sigmoid_())
    return k


class Enter(torch.autograd.Function):
    """Marks the input before the recurrent kernel; its backward runs after the kernel's.

    Args:
        gates: X [T, N, D·gates·H].
        weights: W_hh and b_hh of each direction, detached.
        triggers: inputs that make autograd come here.
    """

    @staticmethod
    def forward(ctx, gates, run: Run, weights: list[Weights], *triggers):
        ctx.run = run
        # What `save_for_backward` sets, which is a function in Python.
        ctx.to_save = (gates, *chain(*weights)) if run.layer.reads_gates else (None,)
        return gates

    @staticmethod
    def backward(ctx, g):
        gates, *weights = ctx.saved_tensors
        if type(g) is not Tensor or torch.is_grad_enabled():
            g = tensor_parallel.arrived(g)
        if gates is None:
            ctx.run.deliver(g, None, [])
        else:
            with torch.autocast(g.device.type, enabled=False):
                weights = [None if w is None else w.to(g.dtype) for w in weights]
                ctx.run.deliver(g, gates, weights)
        return g, *[None] * (len(ctx.needs_input_grad) - 1)


class Leave(torch.autograd.Function):
    """The states, behind the kernel: [T, N, D·H], and the last h, and c of an LSTM.

    Args:
        h: the first one, detached.
    """

    @staticmethod
    def forward(ctx, run: Run, h, outputs, *last):
        ctx.run = run
        ctx.to_save, ctx.materialize_grads = (outputs, h), False  # as in `Enter`
        return outputs, *last

    @staticmethod
    def backward(ctx, *gradients):
        ctx.run.states = ctx.saved_tensors
        return None, None, *gradients
