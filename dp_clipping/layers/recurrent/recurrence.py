"""Computes per-sample gradients of a recurrent layer's weights from its backward.

Two functions that compute nothing surround the kernel: `Enter` before it, on the inputs' share X of
the gates, and `Leave` after it. In backward `Leave` runs first and saves the states of all time
steps, then the kernel's backward runs, and `Enter` gets G, the gradient at the gates. Per-sample
gradients of the weights that the kernel has read are products over the time steps t:

    W_hh    Σ_t k_t h_{t-1}ᵀ        k: gradient of W_hh h + b_hh, which is G. In a GRU the new gate
    b_hh    Σ_t k_t                 multiplies it with the reset gate r: G_n r there
    W_hr    Σ_t g_t (o_t tanh c_t)ᵀ g: gradient of h_t, of an LSTM that projects its states (Sak et
                                    al. 2014): what comes from outside, and W_hhᵀ k_{t+1}

r, and o and c of an LSTM that projects, are computed again from X and the states: one product for
all time steps.
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
        names: of W_ih, b_ih, W_hh, b_hh and W_hr, whether it has them or not.
        input, hidden, projection: the sites of W_ih and b_ih, of W_hh and b_hh, and of W_hr.
    """

    names: list[str]
    input: Site
    hidden: Site
    projection: Site


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
        sites = [site for part in parts for site in (part.hidden, part.projection)]
        self.records = [site.records[0] for site in sites if site.records]
        self.reads_gates = mode == "GRU" or any(part.projection.records for part in parts)


class Run:
    """One run of the kernel, on N sequences.

    Args:
        layer: the layer that is run.
        private_step: takes what backward leaves.
        packing: the packing of the sequences; None: they are of one length.
    """

    def __init__(self, layer: Layer, private_step: Any, packing: Packing | None):
        self.layer, self.private_step, self.packing = layer, private_step, packing
        # Between the two backwards: outputs [T, N, D·H], the first h and c [D, N, H], and the
        # gradients of the outputs and of the last h. All but outputs and h may be None.
        self.states: tuple[Tensor | None, ...] | None = None

    def announce(self, gates: Tensor, weights: list[Weights]) -> None:
        """Tells the step which products the kernel will compute; `gates`: X of one direction."""
        for part, (weight, _, projection) in zip(self.layer.parts, weights, strict=True):
            for site, factor in ((part.hidden, weight), (part.projection, projection)):
                if site.planned is not None and factor is not None:
                    shape = torch.Size((*gates.shape[:2], factor.shape[1]))
                    call = (site.planned, shape, gates.dtype, factor.shape[0])
                    self.private_step.plans.calls.append(call)

    def deliver(self, g: Tensor, gates: Tensor | None, weights: list[Any]) -> None:
        """Leaves the factors that G [T, N, D·gates·H] and the states give.

        Args:
            gates: X, if the layer reads it.
            weights: then also W_hh, b_hh and W_hr of each direction, of the dtype of G.
        """
        states, self.states = self.states, None
        assert states is not None, "Leave's backward comes before Enter's"
        outputs, h, c, of_outputs, of_last = states
        parts = self.layer.parts
        none = [None] * len(parts)
        over_time: Any = (g, gates, outputs, of_outputs)  # [T, N, D·..]
        shares = [none if x is None else x.chunk(len(parts), 2) for x in over_time]
        shares += [none if x is None else x.unbind() for x in (h, c, of_last)]
        for n, (part, *own) in enumerate(zip(parts, *shares, strict=True)):
            direction = Direction(bool(n), self.packing, weights[3 * n : 3 * n + 3], *own)
            direction.deliver(part, self.private_step, self.layer.mode)


@dataclass
class Direction:
    """One direction of a run in its backward.

    Attributes:
        reverse: it begins at the last time step.
        weights: W_hh, b_hh and W_hr, of the dtype of G, if the layer reads X.
        g, gates: G and X, [T, N, gates·H]; X is None if the layer does not read it.
        outputs, of_outputs: the states h of all time steps, [T, N, H], and their gradient or None.
        h, c: the first states, [N, H]; c is None but for an LSTM.
        of_last: the gradient of the last h, [N, H], or None.
    """

    reverse: bool
    packing: Packing | None
    weights: list[Any]
    g: Tensor
    gates: Any
    outputs: Tensor
    of_outputs: Tensor | None
    h: Tensor
    c: Any
    of_last: Tensor | None

    def deliver(self, part: Part, private_step: Any, mode: str) -> None:
        """Leaves the factors of W_hh and b_hh, and of W_hr."""
        hidden, projection, before = part.hidden, part.projection, self._before()
        k = self._of_hidden(before) if mode == "GRU" else self.g
        if hidden.records:
            private_step.take(LINEAR, hidden.records, hidden, (k, before))
        if projection.records:
            of_outputs, inner = self._of_outputs(k), self._unprojected(before)
            private_step.take(LINEAR, projection.records, projection, (of_outputs, inner))

    def _before(self) -> Tensor:
        """Returns the state before each time step."""
        if not self.reverse:
            return torch.cat([self.h[None], self.outputs[:-1]])
        if self.packing is None:
            return torch.cat([self.outputs[1:], self.h[None]])
        before = F.pad(self.outputs[1:], (0, 0, 0, 0, 0, 1))
        before[self.packing.last_tokens()] = self.h
        return before

    def _of_hidden(self, before: Tensor) -> Tensor:
        """Returns the gradient of W_hh h + b_hh in a GRU."""
        width = before.shape[2]
        reset = self._activations(before, slice(0, width)).sigmoid_()
        k = self.g.clone()
        k[..., 2 * width :].mul_(reset)
        return k

    def _activations(self, before: Tensor, own: slice) -> Tensor:
        """Returns X + W_hh h + b_hh of some gates, wide."""
        weight, bias, _ = self.weights
        bias = None if bias is None else bias[own]
        wide = accumulation_dtype(self.gates.dtype)
        return F.linear(before, weight[own], bias).to(wide) + self.gates[..., own]

    def _unprojected(self, before: Tensor) -> Tensor:
        """Returns o tanh(c) of all time steps."""
        admit, keep, new, out = self._activations(before, slice(None)).chunk(4, 2)
        keep, added = keep.sigmoid(), admit.sigmoid() * new.tanh()
        if self.packing is not None:  # states stay as they are where a sequence has not begun
            running = self.packing.running()
            keep, added = keep.masked_fill(~running, 1), added.masked_fill(~running, 0)
        c = self.c.to(keep.dtype)
        cells = torch.empty_like(keep)
        times = range(len(keep))
        for t in reversed(times) if self.reverse else times:
            c = torch.addcmul(added[t], keep[t], c, out=cells[t])
        return (out.sigmoid() * cells.tanh()).to(self.gates.dtype)

    def _of_outputs(self, k: Tensor) -> Tensor:
        """Returns the gradient of each h: what comes from outside, and from the next time step."""
        following, packing = k @ self.weights[0], self.packing
        if self.reverse:
            g = F.pad(following[:-1], (0, 0, 0, 0, 1, 0))
        else:
            g = F.pad(following[1:], (0, 0, 0, 0, 0, 1))
        if self.of_outputs is not None:
            g += self.of_outputs
        if self.of_last is not None:
            if self.reverse or packing is None:
                g[0 if self.reverse else -1] += self.of_last
            else:
                g[packing.last_tokens()] += self.of_last
        return g if packing is None else g.masked_fill_(~packing.running(), 0)


class Enter(torch.autograd.Function):
    """Marks the input before the recurrent kernel; its backward runs after the kernel's.

    Args:
        gates: X [T, N, D·gates·H].
        weights: W_hh, b_hh and W_hr of each direction, detached.
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
        h, c: the first ones, detached; c is None but for an LSTM.
    """

    @staticmethod
    def forward(ctx, run: Run, h, c, outputs, *last):
        ctx.run = run
        ctx.to_save, ctx.materialize_grads = (outputs, h, c), False  # as in `Enter`
        return outputs, *last

    @staticmethod
    def backward(ctx, gy, gh, *rest):
        ctx.run.states = (*ctx.saved_tensors, gy, gh)
        return None, None, None, gy, gh, *rest
