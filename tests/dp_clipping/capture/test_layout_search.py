"""Where the samples are in each layer, and how often a parameter is used."""

import copy

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.layers.batch_layout import Layout
from tests.dp_clipping.conftest import (
    assert_close,
    assert_exact,
    clipped_sums,
    private,
    private_loss,
)
from tests.support import zoo
from tests.support.turns import in_turn


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
    joints = {one.joint for one in model.capture.trained if one.joint is not None}
    found = {
        tuple(one.name for one in joint.records): {one.name for one in joint.linear}
        for joint in joints
    }
    assert found == {("table.weight",): set(), ("layer.weight", "layer.bias"): {"layer.weight"}}


@pytest.mark.parametrize("is_first", [False, True])
def test_flattened_samples_are_refused_behind_rows_picked_by_value_only(is_first):
    """Picks rows at the end, as a head that is fused with its loss picks labelled tokens."""

    def forward(net, x):
        flat = x.flatten(0, 1)
        picks = flat.isfinite().all(1)
        y = torch.tanh(net.layer(flat[picks] if is_first else flat))
        return (y if is_first else y[picks]).unflatten(0, x.shape[:2])

    model = private(zoo.Net(forward, layer=nn.Linear(4, 3)), "bookkeeping")
    model(torch.randn(5, 2, 4))
    kinds = [handle.kind for handle in model.capture.handles]
    assert kinds == (["vectorized"] if is_first else ["linear"])


def partitioned(net, x):
    """Gives a layer the rows with one sign, and then the others."""
    is_first = x[:, 0] > 0
    places = torch.cat((is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]))
    y = net.layer(torch.cat((x[is_first], x[~is_first])))
    return net.head(torch.zeros_like(y).index_copy(0, places, y))


def sorted_by_value(net, x):
    order = (x[:, 0] <= 0).long().argsort(stable=True)
    return net.head(net.layer(x[order])[order.argsort()])


def with_a_parameter_of_its_own(net, x):
    order = (x[:, 0] <= 0).long().argsort(stable=True)
    return net.head((x[order] @ net.own)[order.argsort()])


@pytest.mark.parametrize("forward", [partitioned, sorted_by_value, with_a_parameter_of_its_own])
def test_rows_that_are_in_order_by_chance_in_the_first_batch(forward):
    layers = {"layer": nn.Linear(4, 4), "own": nn.Parameter(torch.randn(4, 4))}
    unused = "own" if forward is not with_a_parameter_of_its_own else "layer"
    del layers[unused]
    network = zoo.Net(forward, **layers, head=nn.Linear(4, 3)).double()
    model = private(copy.deepcopy(network), "bookkeeping", 0.1)
    x = torch.randn(4, 4, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs()
    for number in range(3):
        if number == 2:  # which is not checked
            x = x * torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None]
        batch = x, torch.randn(4, 3, dtype=torch.float64)
        expected = oracle.per_sample_gradients(network, batch, zoo.product)
        assert_close(clipped_sums(model, batch), oracle.clipped_sum(expected, 0.1), 1e-9)
    norms = model.per_sample_gradient_norms.double()
    torch.testing.assert_close(norms, oracle.norms(expected).double())


def test_rows_with_a_dimension_for_the_samples_are_not_looked_for():
    """Code that says how many rows each sample has, as heads that read one token of each."""

    def forward(net, x):
        last = x[x[..., 0] == x[..., 0].amax(1, keepdim=True)]
        return net.head(last.view(len(x), -1, 4)[:, -1])

    model = private(zoo.Net(forward, head=nn.Linear(4, 3)))
    model(torch.randn(4, 5, 4))
    assert [handle.kind for handle in model.capture.handles] == ["linear"]


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_what_all_samples_share_may_be_taken_for_tokens(tokens):
    """A vector gets a dimension for the samples, which is then beside the tokens."""

    def forward(net, x):
        return net.head(x * net.layer(torch.ones(4, dtype=x.dtype))).sum(1)

    network = zoo.Net(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, 3)).double()
    x = torch.randn(4, tokens, 4, dtype=torch.float64)
    assert_exact(network, (x, torch.randn(4, 3, dtype=torch.float64)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_sample_of_the_first_batch_whose_values_are_not_finite(value):
    def forward(net, x):
        y = net.flat(x.flatten(0, 1)).view_as(x).clone()
        y[:, 0] = net.own
        return net.head(y).sum(1)

    layers = {"flat": nn.Linear(4, 4), "own": nn.Parameter(torch.randn(4)), "head": nn.Linear(4, 3)}
    network = zoo.Net(forward, **layers).double()
    x, targets = torch.randn(4, 5, 4).double(), torch.randn(4, 3).double()
    found = private(copy.deepcopy(network)), private(network)
    expected = clipped_sums(found[0], (x[1:], targets[1:]))
    x[0, 2, 1] = value
    assert_close(clipped_sums(found[1], (x, targets)), expected, 1e-9)


class Logits(nn.Module):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, ids):
        return self.network(input_ids=ids).logits


SIZES = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "experts"), in_turn(["default", "eager", "batched_mm"], [1, 2])
)
def test_a_mixture_of_experts(implementation, experts):
    mixtral = pytest.importorskip("transformers.models.mixtral")
    config = mixtral.MixtralConfig(
        **SIZES, num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, pad_token_id=0,
        num_experts_per_tok=experts,
    )  # fmt: skip
    network, ids = mixtral.MixtralForCausalLM(config), torch.randint(1, 11, (3, 4))
    batch = ids, torch.randn(3, 4, 11)
    single, network = network, copy.deepcopy(network).double()
    network.set_experts_implementation("eager" if implementation == "default" else implementation)
    exact = ids, batch[1].double()
    assert_exact(Logits(network), exact, tolerance=1e-6)
    if implementation == "default":  # which takes no float64
        model, other = private(Logits(single)), private(Logits(network))
        found, expected = clipped_sums(model, batch), clipped_sums(other, exact)
        assert_close(found, expected, 1e-4)


def test_rwkv():
    rwkv = pytest.importorskip("transformers.models.rwkv")
    torch.manual_seed(0)
    config = rwkv.RwkvConfig(**SIZES, attention_hidden_size=8, context_length=8)
    network = Logits(rwkv.RwkvForCausalLM(config)).double()
    batch = torch.randint(11, (3, 4)), torch.randn(3, 4, 11, dtype=torch.float64)
    assert_exact(network, batch, tolerance=1e-6)


class Classes(nn.Module):
    """Many classes, by the module's own forward or by all logarithms."""

    def __init__(self, uses_all: bool):
        super().__init__()
        self.classes = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6], div_value=2.0)
        self.uses_all = uses_all

    def forward(self, x, y):
        if self.uses_all:
            return self.classes.log_prob(x).gather(1, y[:, None]).squeeze(1)
        return self.classes(x, y).output


@pytest.mark.parametrize("uses_all", [True, False])
def test_a_layer_that_only_some_samples_call(uses_all):
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 4, 8, 2])
    batch = {"x": x, "y": y}, torch.randn(4, dtype=torch.float64)
    assert_exact(Classes(uses_all).double(), batch)


def test_a_layer_whose_hooks_give_its_input_another_shape():
    layer = nn.Linear(4, 2)
    layer.register_forward_pre_hook(lambda _, args: (args[0].unsqueeze(1),))
    layer.register_forward_hook(lambda _, args, y: y.squeeze(1))
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layer).double()
    assert_exact(network, tuple(torch.randn(5, n, dtype=torch.float64) for n in (3, 2)))
