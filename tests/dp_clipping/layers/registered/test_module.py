"""Registered layers in a step; in every mode, and used twice, they are records in `ops/`."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping import register_layer
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
from tests.support.registered_layers import (
    Apart,
    Dense,
    Gate,
    gate_gradients,
    gate_norms,
    gate_sums,
)


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


def test_a_class_may_be_registered_again():
    """With the same function, as a notebook's cell does."""
    register_layer(Gate, gate_gradients)


def test_outside_of_a_step_it_is_the_layer(monkeypatch):
    network = Gate(5, 3)
    model = private(network)
    monkeypatch.setattr(registered, "replaced", None)
    model.eval()
    x = torch.randn(2, 5)
    assert torch.equal(model(x), Gate.forward(network, x))


# Functions of norms and of clipped sums


def backward(network: nn.Module, batch=None) -> dict:
    return sums(network, zoo.numbers(6, 4, 5, out=(4, 3)) if batch is None else batch)


def of_two(norm=gate_norms, weighted_sum=gate_sums) -> type[Gate]:
    kind = type("Wrong", (Gate,), {})
    register_layer(kind, norm=norm, weighted_sum=weighted_sum)
    return kind


def test_functions_are_called_once_for_all_parameters():
    calls = []

    def counted(fn):
        def wrapped(*args):
            calls.append(fn)
            return fn(*args)

        return wrapped

    network = nn.Sequential(of_two(counted(gate_norms), counted(gate_sums))(5, 3))
    model, batch = private(network, "bookkeeping", 0.5), zoo.numbers(6, 4, 5, out=(4, 3))
    for _ in range(2):
        private_loss(model, batch, zoo.product).backward()
    calls.clear()
    private_loss(model, batch, zoo.product).backward()  # the third: no samples are run alone
    assert calls == [gate_norms, gate_sums]


def test_nothing_is_held_after_a_step():
    held = []

    def norm(layer, gradient, x):
        held.append(weakref.ref(gradient))
        return gate_norms(layer, gradient, x)

    backward(nn.Sequential(of_two(norm)(5, 3)))
    gc.collect()
    assert held
    assert all(reference() is None for reference in held)


@pytest.mark.parametrize("place", ["input", "gradient"])
def test_a_sample_that_is_not_finite_is_left_out(place):
    """Its row does not reach the sum, where zero times infinity would."""
    network = nn.Sequential(Apart(5, 3))
    x, y = zoo.numbers(6, 4, 5, out=(4, 3))
    rest = [i for i in range(6) if i != 2]
    good = backward(copy.deepcopy(network), (x[rest], y[rest]))
    (x if place == "input" else y)[2, 1, 1] = float("inf")
    assert_close(backward(network, (x, y)), good, 1e-5)


def test_what_has_no_gradient_at_zero_is_not_given_zeros():
    class Length(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return x / x.norm(dim=-1, keepdim=True) * self.scale

    def rows(layer, gradient, x):
        return gradient * (x / x.norm(dim=-1, keepdim=True))

    register_layer(
        Length,
        norm=lambda *args: {"scale": rows(*args).norm(dim=1)},
        weighted_sum=lambda layer, gradient, c, x: {"scale": c @ rows(layer, gradient, x)},
    )
    x, y = zoo.numbers(4, 5, out=(5,))
    x[1] = float("nan")
    assert all(g.isfinite().all() for g in backward(nn.Sequential(Length()), (x, y)).values())


class Marker(nn.Module):
    """x + marked · v: the layer of docs/extend.md, with two inputs."""

    def __init__(self, features: int):
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(features))

    def forward(self, x, marked):
        return x + marked * self.vector


register_layer(
    Marker,
    norm=lambda layer, gradient, x, marked: {
        "vector": torch.linalg.vector_norm(marked.mT @ gradient, dim=(1, 2))
    },
    weighted_sum=lambda layer, gradient, c, x, marked: {
        "vector": torch.einsum("b,bti,btd->d", c, marked, gradient)
    },
)


@pytest.mark.parametrize("mode", MODES)
def test_several_inputs(mode):
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.marker, self.head = Marker(5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.marker(x, x.sum(-1, keepdim=True).gt(0).to(x.dtype)))

    network, batch = Tagged(), zoo.numbers(6, 4, 5, out=(4, 3))
    assert_step(
        private(copy.deepcopy(network), mode, 0.5), network, batch, limit=0.5, tolerance=1e-4
    )
