"""Registered layers in a step; in every mode, and used twice, they are records in `ops/`."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping import LinearProduct, register_layer
from dp_clipping.layers.recorder import DENSE, LINEAR
from dp_clipping.layers.registered import module as registered
from dp_clipping.step.sums.work import Work
from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    assert_step,
    gradients_of,
    private,
    private_loss,
)
from tests.support import zoo
from tests.support.registered_layers import Dense, Gate, gate_gradients


def sums(network: nn.Module, batch, mode: str = "bookkeeping") -> dict:
    model = private(network, mode, 0.5)
    private_loss(model, batch, zoo.product).backward()
    return gradients_of(model)


def expected(network: nn.Module, batch) -> dict:
    return oracle.clipped_sum(oracle.per_sample_gradients(network, batch, zoo.product), 0.5)


def test_products_are_delivered_as_they_are(monkeypatch):
    kinds = {}
    take = Work.take

    def note(self, kind, records, value, tensors):
        kinds.update((record.name, kind) for record in records)
        take(self, kind, records, value, tensors)

    monkeypatch.setattr(Work, "take", note)
    batch = zoo.numbers(4, 2, 40, out=(2, 30))
    network = nn.Sequential(Gate(40, 30), Dense(30, 30))
    plain = copy.deepcopy(network)
    assert_close(sums(network, batch), expected(plain, batch), 1e-4)
    assert {name for name, kind in kinds.items() if kind == LINEAR} == {"0.weight"}
    assert set(kinds.values()) == {LINEAR, DENSE}


NETWORKS = {
    "checkpointed": lambda: zoo.Net(
        lambda net, x: net.head(checkpoint(net.gate, x, use_reentrant=False)),
        gate=Gate(5, 4), head=Dense(4, 3),
    ),
    "under vmap": lambda: zoo.Net(
        lambda net, x: net.gate(x) * net.own, gate=Gate(5, 3), own=nn.Parameter(torch.ones(3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETWORKS)
def test_inside_of_other_modules(name, mode):
    network, batch = NETWORKS[name](), zoo.numbers(4, 6, 5, out=(6, 3))
    model = private(copy.deepcopy(network), mode, 0.5)
    assert_step(model, network, batch, limit=0.5, tolerance=1e-4)
    assert {h.name: h.kind for h in model.capture.handles}["gate"] == "registered"


def test_compiled():
    network, batch = nn.Sequential(Gate(5, 4), nn.Linear(4, 3)), zoo.numbers(4, 6, 5, out=(6, 3))
    plain = copy.deepcopy(network)
    network.compile(backend="eager")
    assert_close(sums(network, batch, "flash_bookkeeping"), expected(plain, batch), 1e-4)


def test_an_output_may_be_changed_in_place_as_without():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return x + self.shift

    register_layer(Shift, lambda layer, gradient, x: {"shift": gradient})
    network = nn.Sequential(nn.Linear(5, 5), Shift(), nn.ReLU(inplace=True), nn.Linear(5, 3))
    batch = zoo.numbers(4, 5, out=(3,))
    assert_close(sums(network, batch), expected(copy.deepcopy(network), batch), 1e-4)


def test_an_output_that_backward_needs_may_not_be_changed_as_without():
    class Tanh(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return (x + self.shift).tanh()

    network = nn.Sequential(nn.Linear(5, 5), Tanh(), nn.ReLU(inplace=True))
    x = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        network(x).sum().backward()
    register_layer(
        Tanh, lambda layer, gradient, x: {"shift": gradient * (1 - (x + layer.shift).tanh() ** 2)}
    )
    model = private(network)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        private_loss(model, (x, torch.randn(4, 5)), zoo.product).backward()


def test_outside_of_a_step_it_is_the_layer(monkeypatch):
    network = Gate(5, 3)
    model = private(network)
    monkeypatch.setattr(registered, "replaced", None)
    model.eval()
    x = torch.randn(2, 5)
    assert torch.equal(model(x), Gate.forward(network, x))


def with_bias(value):
    return lambda *a: gate_gradients(*a) | {"bias": value}


REFUSED = {
    "returns list: return a dictionary": lambda layer, gradient, x: [gradient],
    "returns NoneType for 'scale'": lambda *a: dict(list(gate_gradients(*a).items())[:2]),
    r"\[1, 4\] for 'bias'": with_bias(torch.zeros(1, 4)),
    "NoneType for 'bias'": with_bias(None),
    "int64 for 'bias'": with_bias(torch.zeros(1, 3, dtype=torch.long)),
    r"return LinearProduct\(a": lambda *a: (
        gate_gradients(*a) | {"weight": LinearProduct(torch.zeros(1, 2, 3), torch.zeros(1, 2, 5))}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_function_must_return(message):
    kind = type("Odd", (Gate,), {})
    register_layer(kind, REFUSED[message])
    with pytest.raises(ValueError, match=message):
        sums(nn.Sequential(kind(5, 3)), zoo.numbers(4, 5, out=(3,)))


def test_a_layer_that_returns_two_tensors_is_refused():
    kind = type("Two", (Gate,), {"forward": lambda self, x: (x * self.scale, self.bias)})
    register_layer(kind, gate_gradients)
    network = zoo.Net(lambda net, x: net.two(x)[0], two=kind(3, 3))
    with pytest.raises(ValueError, match=r"two \(Two\) returns 2 tensors"):
        sums(network, zoo.numbers(4, 3, out=(3,)))
