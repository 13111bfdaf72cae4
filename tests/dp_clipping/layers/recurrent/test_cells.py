"""Cells in a loop of the user's: outputs are PyTorch's, gradients those of one sample at a time."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.layers.recurrent import cells
from dp_clipping.step.private_step import PrivateStep
from tests.dp_clipping.conftest import (
    MODES,
    assert_exact,
    criterion_of,
    private,
    private_loss,
    unchecked,
)
from tests.dp_clipping.step.test_on_gpu import compare_with_oracle
from tests.support import zoo

B, T, P, H = 4, 5, 3, 6
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}


class Loop(nn.Module):
    """A cell that is called for each time step, given first states or not."""

    def __init__(self, cell: nn.RNNCellBase, has_states: bool = False) -> None:
        super().__init__()
        self.project, self.cell, self.has_states = nn.Linear(P, P), cell, has_states

    def forward(self, x: Tensor) -> Tensor:
        x, is_lstm, state = self.project(x), isinstance(self.cell, nn.LSTMCell), None
        if self.has_states:
            first = x[:, 0, :1].sin().expand(len(x), H)
            state = (first, first.cos()) if is_lstm else first
        found = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            found += state if is_lstm else [state]
        return torch.stack(found, 1)


@pytest.mark.parametrize("name", CELLS)
def test_one_step_is_pytorchs(name):
    torch.manual_seed(0)
    cell = CELLS[name](P, H).double()
    x, h, c = (torch.randn(B, n, dtype=torch.float64) for n in (P, H, H))
    i, k = x @ cell.weight_ih.t() + cell.bias_ih, h @ cell.weight_hh.t() + cell.bias_hh
    if name == "lstm":
        for mine, theirs in zip(cells.lstm(i, k, c), cell(x, (h, c)), strict=True):
            torch.testing.assert_close(mine, theirs)
    elif name == "gru":
        torch.testing.assert_close(cells.gru(i, k, h), cell(x, h))
    model = unchecked(Loop(cell).double())
    x = torch.randn(B, T, P, dtype=torch.float64)
    expected = Loop.forward(model.network, x)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients(name, has_states, mode):
    torch.manual_seed(0)
    network = Loop(CELLS[name](P, H, bias=has_states), has_states).double()
    x = torch.randn(B, T, P, dtype=torch.float64)
    kinds = assert_exact(network, (x, torch.randn_like(network(x))), mode)
    assert kinds == {"linear", "cell"}


def words() -> nn.Module:
    """A cell on all words of all samples, flattened."""

    def forward(net, x):
        state = None
        for one in x.unflatten(2, (2, 2)).flatten(0, 1).unbind(1):
            state = net.cell(one, state)
        return state.unflatten(0, x.shape[:2])

    return zoo.Net(forward, cell=nn.GRUCell(2, H))


def once() -> nn.Module:
    return zoo.Net(lambda net, x: net.cell(x[:, 0])[1], cell=nn.LSTMCell(4, H))


def tied() -> nn.Module:
    """The weight of states is that of a linear layer and of another cell too."""
    net = zoo.Net(
        lambda net, x: net.c(net.b(net.a(x[:, 0]), net.a(x[:, 1], x[:, 2]))),
        a=nn.RNNCell(4, 4), b=nn.RNNCell(4, 4), c=nn.Linear(4, 4),
    )  # fmt: skip
    net.b.weight_hh = net.c.weight = net.a.weight_hh
    net.a.bias_ih.requires_grad_(False)
    net.b.weight_ih.requires_grad_(False)
    return net


def beside_a_parameter() -> nn.Module:
    return zoo.Net(
        lambda net, x: net.cell(x[:, 1], net.cell(x[:, 0]))[0] * net.scale,
        cell=nn.LSTMCell(4, 4), scale=nn.Parameter(torch.ones(4)),
    )  # fmt: skip


@pytest.mark.parametrize("build", [words, once, tied, beside_a_parameter])
@pytest.mark.parametrize("mode", MODES[1:])
def test_other_networks(build, mode):
    network = zoo.seeded(build).double()
    x = torch.randn(B, T, 4, dtype=torch.float64)
    assert_exact(network, (x, torch.randn_like(network(x))), mode)


def test_factors_of_all_calls_are_handed_over_together(monkeypatch):
    given = []
    factors = PrivateStep.factors
    monkeypatch.setattr(PrivateStep, "factors", lambda *a: given.append(a[2]) or factors(*a))
    model = unchecked(Loop(nn.LSTMCell(P, 40)))
    private_loss(model, (torch.randn(B, T, P), torch.ones(B, 1, 1)), zoo.product).backward()
    assert [tuple(f.a.shape) for f in given if f.y.shape[2] == 4 * 40] == [(B, T, 40)]


@pytest.mark.parametrize("name", CELLS)
def test_under_autocast_outputs_are_pytorchs(name):
    torch.manual_seed(0)
    network, x = Loop(CELLS[name](P, H)), torch.randn(B, T, P)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network(x)
        model = private(network)
        outputs = model(x)
        assert outputs.dtype == expected.dtype
        torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
        criterion_of(model, zoo.product)(outputs, torch.ones_like(outputs)).backward()
    assert model.per_sample_gradient_norms.isfinite().all()


def test_rows_that_all_samples_share_are_refused():
    network = zoo.Net(lambda net, x: x + net.cell(torch.ones(1, P)), cell=nn.GRUCell(P, P))
    with pytest.raises(ValueError, match=r"cell \(GRUCell\).*\[batch, features\]"):
        unchecked(network)(torch.randn(B, P))


def check_on_kernels() -> None:
    for mode in ("flash", "flash_bookkeeping"):
        compare_with_oracle(zoo.BY_NAME["cells"], "cpu", torch.float32, mode)


def test_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_on_kernels)
