"""`nn.MultiheadAttention` among other layers; by itself it is in `tests/dp_clipping/ops`."""

import copy

import pytest
import torch
from torch import nn

from tests.dp_clipping.conftest import assert_exact, unchecked
from tests.support import zoo

B, L, S, E = 4, 3, 5, 8


def tied() -> nn.Module:
    """The last projection's weight is that of the layer before."""

    def run(net, x):
        x = torch.tanh(net.project(x))
        return net.layer(x, x, x, need_weights=False)[0]

    layer = nn.MultiheadAttention(E, 2, batch_first=True)
    network = zoo.Net(run, layer=layer, project=nn.Linear(E, E))
    network.project.weight = layer.out_proj.weight
    return network


def beside_a_parameter() -> nn.Module:
    def run(net, x):
        x = torch.cat([net.token.expand(len(x), 1, -1), x], 1)
        return net.layer(x, x, x, need_weights=False)[0][:, 0]

    return zoo.Net(
        run, token=nn.Parameter(torch.randn(1, 1, E)),
        layer=nn.MultiheadAttention(E, 2, batch_first=True),
    )  # fmt: skip


@pytest.mark.parametrize("build", [tied, beside_a_parameter])
def test_other_networks(build):
    network = zoo.seeded(build).double()
    x = torch.randn(B, S, E, dtype=torch.float64)
    assert "attention" in assert_exact(network, (x, torch.randn_like(network(x))))


def test_what_all_samples_share_is_run_under_vmap():
    def run(net, x):
        query = torch.linspace(-1, 1, 2 * E).view(1, 2, E).to(x)
        return x.sum(1, keepdim=True) * net.layer(query, query, query)[0]

    network = zoo.Net(run, layer=nn.MultiheadAttention(E, 2, batch_first=True)).double()
    x = torch.randn(B, S, E, dtype=torch.float64)
    assert assert_exact(network, (x, torch.randn_like(network(x)))) == {"vectorized"}


def test_dropout_draws_what_pytorch_draws():
    network = zoo.Net(
        lambda net, x: net.layer(x, x, x)[0],
        layer=nn.MultiheadAttention(E, 2, dropout=0.5, batch_first=True),
    )
    x = torch.randn(B, S, E)
    model = unchecked(copy.deepcopy(network))
    model(x)
    torch.manual_seed(0)
    outputs = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(outputs, network(x), rtol=1e-5, atol=1e-6)
