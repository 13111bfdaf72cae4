"""Recurrent cells among other layers; by themselves they are in `tests/dp_clipping/ops`."""

import pytest
import torch
from torch import nn

from tests.dp_clipping.conftest import MODES, assert_exact, unchecked
from tests.support import zoo

B, T, P, H = 4, 5, 3, 6


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


def test_rows_that_all_samples_share_are_refused():
    network = zoo.Net(lambda net, x: x + net.cell(torch.ones(1, P)), cell=nn.GRUCell(P, P))
    with pytest.raises(ValueError, match=r"cell \(GRUCell\).*\[batch, features\]"):
        unchecked(network)(torch.randn(B, P))
