"""All time steps of one layer in one direction, as one autograd function.

The input's share of the gates comes from outside, where it is an ordinary linear layer on all
tokens. Its gradient is what the time steps of backward find. The weight of the states, W_hh, is a
linear layer on tokens too, whose inputs are the states before each step: its factors are handed
over for all time steps together, so cross terms over time are in its norm. Likewise W_hr, which
projects the states of an LSTM (Sak et al. 2014).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.layers.recurrent.cells import Gru


@dataclass(frozen=True)
class Steps:
    """In which order the time steps run, and for which sequences.

    Attributes:
        sizes: of each time step, how many of the sequences still run, longest first.
        reverse: the last time step is the first to run.
        order, places: of the batch's sequences by length, and its inverse; None: as they are.
    """

    sizes: list[int]
    reverse: bool = False
    order: Tensor | None = None
    places: Tensor | None = None

    def forward(self) -> list[tuple[int, int]]:
        """Returns time and number of running sequences of each step, in turn."""
        found = list(enumerate(self.sizes))
        return found[::-1] if self.reverse else found

    def backward(self) -> list[tuple[int, int]]:
        return self.forward()[::-1]

    def by_length(self, x: Tensor, dim: int) -> Tensor:
        """Returns x with its sequences, in the order of the batch, by length."""
        return x if self.order is None else x.index_select(dim, self.order)

    def by_batch(self, x: Tensor, dim: int) -> Tensor:
        """Returns the inverse of `by_length`."""
        return x if self.places is None else x.index_select(dim, self.places)


def _without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


class Recurrence(torch.autograd.Function):
    """All time steps of one layer in one direction.

    Computes in `accumulation_dtype` and returns the dtype of the gates.

    Args:
        gates: W_ih x + b_ih, [N, T, gates · H].
        h, c: first states [N, H]; c is None but for an LSTM.
        weight, bias, projection: W_hh, b_hh and W_hr, detached.
        slots: of these three: inputs that make backward come here; see `handle.gradient_target`.
        takes: of these three: who takes factors a [B, T, p] and y [B, T, d], or y, and returns the
            gradient of the slot; None: frozen.
        layout: of the samples in N sequences.

    Returns:
        States [N, T, H] of all steps, zero where a sequence has ended, and the last h and c.
    """

    @staticmethod
    def forward(
        ctx, gates, h, c, weight, bias, projection, weight_slot, bias_slot, projection_slot,
        cell, steps, takes, layout, batch_size,
    ):  # fmt: skip
        dtype = gates.dtype
        wide = accumulation_dtype(dtype)
        rows = steps.by_length(gates.transpose(0, 1).to(wide), 1)
        h, c = (None if x is None else steps.by_length(x.to(wide), 0).clone() for x in (h, c))
        w, b, r = (None if x is None else x.to(wide) for x in (weight, bias, projection))
        length, count = rows.shape[:2]
        width = rows.shape[2] // cell.gates
        activated = rows.new_zeros(length, count, cell.saved * width)
        outputs, states = (rows.new_zeros(length, count, h.shape[1]) for _ in range(2))
        cells = None if c is None else rows.new_zeros(length, count, width)
        with _without_autocast(rows):
            for t, running in steps.forward():
                before, held = h[:running], None if c is None else c[:running]
                states[t, :running] = before
                k = before @ w.t() if b is None else torch.addmm(b, before, w.t())
                if held is not None:
                    cells[t, :running] = held
                activated[t, :running], new, held = cell.step(rows[t, :running], k, before, held)
                if r is not None:
                    new = new @ r.t()
                outputs[t, :running] = h[:running] = new
                if held is not None:
                    c[:running] = held
        ctx.save_for_backward(activated, states, cells, weight, projection)
        ctx.rest = cell, steps, takes, layout, batch_size, dtype
        ctx.set_materialize_grads(False)
        h, c = (None if x is None else steps.by_batch(x, 0).to(dtype) for x in (h, c))
        y = steps.by_batch(outputs, 1).transpose(0, 1).to(dtype).data  # see projection.product
        return y, h, c

    @staticmethod
    def backward(ctx, gy, gh, gc):
        activated, states, cells, weight, projection = ctx.saved_tensors
        cell, steps, takes, layout, batch_size, dtype = ctx.rest
        wide = activated.dtype
        length, count, features = states.shape
        w, r = (None if x is None else x.to(wide) for x in (weight, projection))

        def first(g: Tensor | None, width: int) -> Tensor:
            if g is None:
                return states.new_zeros(count, width)
            return steps.by_length(g.to(wide), 0).clone()

        gh = first(gh, features)
        gc = None if cells is None else first(gc, cells.shape[2])
        if gy is not None:
            gy = steps.by_length(gy.transpose(0, 1).to(wide), 1)
        of_input = states.new_zeros(length, count, weight.shape[0])
        of_hidden = torch.zeros_like(of_input) if isinstance(cell, Gru) else of_input
        of_states = None if r is None else torch.zeros_like(states)
        with _without_autocast(states):
            for t, running in steps.backward():
                g = gh[:running] if gy is None else gh[:running] + gy[t, :running]
                if of_states is not None:
                    of_states[t, :running] = g
                    g = g @ r
                held, g_held = (None, None) if cells is None else (cells[t, :running], gc[:running])
                found = cell.backward(activated[t, :running], states[t, :running], held, g, g_held)
                of_input[t, :running] = found.of_input
                if of_hidden is not of_input:
                    of_hidden[t, :running] = found.of_hidden
                g = found.of_hidden @ w
                gh[:running] = g if found.state is None else g + found.state
                if gc is not None:
                    gc[:running] = found.cell

        def tokens(x: Tensor) -> Tensor:
            x = steps.by_batch(x, 1).transpose(0, 1).to(dtype)
            return layout.batch_tokens(x, batch_size)

        slots: list[Any] = [None] * 3
        if takes[0] or takes[1]:
            y = tokens(of_hidden)
            slots[0] = takes[0] and takes[0](tokens(states), y)
            slots[1] = takes[1] and takes[1](y)
        if takes[2]:
            slots[2] = takes[2](tokens(cell.hidden(activated, cells)), tokens(of_states))
        gates = steps.by_batch(of_input, 1).transpose(0, 1).to(dtype)
        h, c = (None if x is None else steps.by_batch(x, 0) for x in (gh, gc))
        return gates, h, c, None, None, None, *slots, *[None] * 5
