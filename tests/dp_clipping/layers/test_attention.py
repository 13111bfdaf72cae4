"""`nn.MultiheadAttention` among other layers; by itself it is in `tests/dp_clipping/ops`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import assert_exact, private_loss, unchecked
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


class Strides:
    """Notes the order of dimensions in memory of queries, and of the gradient that comes back."""

    def __init__(self):
        self.orders: list[tuple[list[int], list[int]]] = []
        self._attend = F.scaled_dot_product_attention

    def __call__(self, q, *others):
        y = self._attend(q, *others)
        y.register_hook(lambda g: self.orders.append((order_of(q), order_of(g))))
        return y


def order_of(x: torch.Tensor) -> list[int]:
    return sorted(range(x.dim()), key=lambda dim: -x.stride(dim))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_self_attention", [True, False])
def test_gradients_lie_in_memory_as_queries_do(monkeypatch, batch_first, is_self_attention):
    """cuDNN (torch 2.11) plans a backward for queries, keys and values that lie as these do once,
    for a gradient that lies as the first one did, and mixes up the samples of others."""

    def run(net, x):
        x = torch.tanh(net.project(x))
        x = x if batch_first else x.transpose(0, 1)
        other = x if is_self_attention else x + 1
        y = net.layer(x, other, other, need_weights=False)[0]
        return y if batch_first else y.transpose(0, 1)

    strides = Strides()
    layer = nn.MultiheadAttention(E, 2, batch_first=batch_first)
    network = zoo.Net(run, layer=layer, project=nn.Linear(E, E)).double()
    model = unchecked(network)
    monkeypatch.setattr(F, "scaled_dot_product_attention", strides)
    batch = [torch.randn(B, L, E, dtype=torch.float64) for _ in range(2)]
    private_loss(model, batch, zoo.product).backward()
    assert strides.orders
    for of_queries, of_gradient in strides.orders:
        assert of_gradient == of_queries


@pytest.mark.gpu
@pytest.mark.parametrize("batch_first", [True, False])
def test_in_16_bit_beside_the_plain_layer(batch_first):
    """A backward of the layer itself, as checks run it, leaves cuDNN a plan for its gradients."""

    def run(net, x):
        x = x if batch_first else x.transpose(0, 1)
        y = net.layer(x, x, x, need_weights=False)[0]
        return y if batch_first else y.transpose(0, 1)

    layer = nn.MultiheadAttention(64, 2, batch_first=batch_first)
    network = zoo.Net(run, layer=layer).to("cuda", torch.bfloat16)
    x, y = (torch.randn(4, 33, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    batch = x, y * torch.tensor([30.0, 1, 1, 1], device="cuda", dtype=y.dtype)[:, None, None]
    norms = oracle.norms(
        oracle.per_sample_gradients(network.double(), [x.double(), batch[1].double()], zoo.product)
    )
    network.bfloat16()
    zoo.product(network(x), batch[1]).sum().backward()
    network.zero_grad()
    model = unchecked(network, "flash_bookkeeping")
    private_loss(model, batch, zoo.product).backward()
    torch.testing.assert_close(model.per_sample_gradient_norms.double(), norms, rtol=0.05, atol=0)
