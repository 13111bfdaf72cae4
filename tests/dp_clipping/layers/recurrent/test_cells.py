"""One time step of each cell, beside PyTorch's own cells and autograd."""

import pytest
import torch
from torch import nn

from dp_clipping.layers.recurrent.cells import Gru, Lstm, Rnn

N, P, H = 3, 4, 5
CELLS = {
    "lstm": (Lstm, lambda: nn.LSTMCell(P, H)),
    "gru": (Gru, lambda: nn.GRUCell(P, H)),
    "tanh": (lambda: Rnn("tanh"), lambda: nn.RNNCell(P, H)),
    "relu": (lambda: Rnn("relu"), lambda: nn.RNNCell(P, H, nonlinearity="relu")),
}


@pytest.mark.parametrize("name", CELLS)
def test_one_step_and_its_gradients(name):
    cell, theirs = (make() for make in CELLS[name])
    theirs.double()
    x, h, c, gh, gc = (torch.randn(N, n, dtype=torch.float64) for n in (P, H, H, H, H))
    if name != "lstm":
        c = gc = None
    i = (x @ theirs.weight_ih.t() + theirs.bias_ih).detach().requires_grad_()
    k = (h @ theirs.weight_hh.t() + theirs.bias_hh).detach().requires_grad_()
    states = [s.clone().requires_grad_() for s in (h, c) if s is not None]
    with torch.no_grad():
        saved, *new = cell.step(i, k, h, c)
        expected = theirs(x, (h, c)) if c is not None else [theirs(x, h)]
    outputs = [s for s in new if s is not None]
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, wanted)

    with torch.no_grad():
        found = cell.backward(saved, h, c, gh, gc)
    i, k = i.detach().requires_grad_(), k.detach().requires_grad_()
    derivatives = torch.autograd.grad(
        _written_out(name, i, k, *states), [i, k, *states], [gh, gc][: len(states)],
        allow_unused=True,
    )  # fmt: skip
    for mine, wanted in zip(
        (found.of_input, found.of_hidden, found.state, found.cell)[: len(derivatives)],
        derivatives, strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, wanted)


def _written_out(name, i, k, h, c=None):
    if name == "lstm":
        admit, keep, new, out = (i + k).chunk(4, 1)
        c = keep.sigmoid() * c + admit.sigmoid() * new.tanh()
        return out.sigmoid() * c.tanh(), c
    if name == "gru":
        (ri, zi, ni), (rk, zk, nk) = i.chunk(3, 1), k.chunk(3, 1)
        z = (zi + zk).sigmoid()
        return [(1 - z) * (ni + (ri + rk).sigmoid() * nk).tanh() + z * h]
    return [(i + k).tanh() if name == "tanh" else (i + k).relu()]


def test_the_states_before_a_projection_are_found_again():
    cell = Lstm()
    i, k, h, c = (torch.randn(N, n) for n in (4 * H, 4 * H, H, H))
    saved, new, _ = cell.step(i, k, h, c)
    torch.testing.assert_close(cell.hidden(saved, c), new)
