"""Where the samples are in each layer, and how often a parameter is used."""

import torch
from torch import nn

from dp_clipping.capture.layout_search import Routing
from dp_clipping.layers.batch_layout import Layout
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo


def layouts_after(network: nn.Module, x: torch.Tensor) -> dict[str, Layout]:
    model = private(network, "bookkeeping")
    y = model(x)
    private_loss(model, (x, torch.ones_like(y)), zoo.product)
    handles = model.capture.handles
    return {h.name: layout for h in handles for (layout,) in h.layouts.values()}


def test_each_layer_has_its_own_layout():
    def forward(net, x):
        y = net.first(x).transpose(0, 1)
        return net.second(y).transpose(0, 1) + net.third(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    network = zoo.Net(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 3), third=nn.Linear(4, 3))
    found = layouts_after(zoo.seeded(lambda: network), torch.randn(3, 5, 4))
    assert found == {
        "first": Layout("dimension", 0),
        "second": Layout("dimension", 1),
        "third": Layout("sample_major"),
    }


def test_weights_that_are_used_twice_keep_their_gradients_dense_or_are_joined():
    """Where all uses are linear layers tokens are those of one."""

    def forward(net, ids):
        x = net.table(ids)
        return net.head(net.layer(net.layer(x)) + net.once(x))

    network = zoo.Net(forward, table=nn.Embedding(9, 4), layer=nn.Linear(4, 4),
                      once=nn.Linear(4, 4), head=nn.Linear(4, 9, bias=False))  # fmt: skip
    network.head.weight = network.table.weight
    model = private(network, "bookkeeping")
    model(torch.arange(3)[:, None])
    found = {h.name: (h.always_dense, set(h.joined)) for h in model.capture.handles}
    assert found == {
        "table": (True, set()), "layer": (True, {"weight"}), "once": (False, set()),
        "head": (True, set()),
    }  # fmt: skip


def test_operators_that_pick_rows_by_their_values_are_noted():
    x = torch.tensor([3.0, 1.0])
    with Routing() as routing:
        x.sort()
        x[x > 2]
        x + 1
    assert "sort" in routing.operators
    assert "index" in routing.operators or "nonzero" in routing.operators
    assert not routing.checks_values
    with Routing() as routing:
        x.long()
    assert routing.checks_values
