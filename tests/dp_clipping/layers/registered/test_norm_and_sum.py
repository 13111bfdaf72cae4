"""Layers whose functions return norms and clipped sums, and no per-sample gradients."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from dp_clipping import register_layer
from tests.dp_clipping.conftest import (
    assert_close,
    assert_step,
    gradients_of,
    private,
    private_loss,
)
from tests.support import zoo
from tests.support.registered_layers import Apart, Gate, gate_norms, gate_sums

C = 0.5


def backward(network: nn.Module, batch=None, mode: str = "bookkeeping", **how) -> dict:
    model = private(network, mode, C, **how)
    batch = zoo.numbers(6, 4, 5, out=(4, 3)) if batch is None else batch
    private_loss(model, batch, zoo.product).backward()
    return gradients_of(model)


def registered(norm=gate_norms, weighted_sum=gate_sums) -> type[Gate]:
    kind = type("Wrong", (Gate,), {})
    register_layer(kind, norm=norm, weighted_sum=weighted_sum)
    return kind


def changed(fn, name: str, change):
    def wrong(*args):
        found = fn(*args)
        return found | {name: change(found[name])}

    return wrong


def test_functions_are_called_once_for_all_parameters():
    calls = []

    def counted(fn):
        def wrapped(*args):
            calls.append(fn)
            return fn(*args)

        return wrapped

    network = nn.Sequential(registered(counted(gate_norms), counted(gate_sums))(5, 3))
    model, batch = private(network, "bookkeeping", C), zoo.numbers(6, 4, 5, out=(4, 3))
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

    backward(nn.Sequential(registered(norm)(5, 3)))
    gc.collect()
    assert held
    assert all(reference() is None for reference in held)


WRONG = {
    "a norm below": ("norm", gate_norms, "weight", lambda n: n * 0.9999),
    "a norm above": ("norm", gate_norms, "bias", lambda n: n * 1.01),
    "a squared norm": ("norm", gate_norms, "scale", torch.square),
    "the batch's norm": ("norm", gate_norms, "scale", lambda n: n.mean().repeat(6)),
    "no number": ("norm", gate_norms, "bias", lambda n: n * float("nan")),
    "a sum's factor": ("weighted_sum", gate_sums, "weight", lambda g: g * 1.1),
}


@pytest.mark.parametrize(("who", "fn", "name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_function_is_refused(who, fn, name, change):
    kind = registered(**{who: changed(fn, name, change)})
    network = nn.Sequential(nn.Linear(5, 5), kind(5, 3))
    who = "norm" if who == "norm" else "function"
    with pytest.raises(ValueError, match=rf"the {who} registered for 1 \(Wrong\) is wrong: for"):
        backward(network)
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize(
    "weigh",
    [torch.square, lambda c: c / c.sum(), lambda c: (c > 0).to(c.dtype), lambda c: c.flip(0)],
    ids=["squared", "divided", "left out", "of other samples"],
)
def test_sums_with_other_coefficients_are_refused(weigh):
    def weighted_sum(layer, gradient, c, x):
        return gate_sums(layer, gradient, weigh(c), x)

    network = nn.Sequential(registered(weighted_sum=weighted_sum)(5, 3))
    with pytest.raises(ValueError, match=r"registered for 0 \(Wrong\) is wrong: for"):
        backward(network)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n[:1], r"returns \[1\] for 'bias': return a tensor \[6\]"),
        (lambda n: n.bfloat16(), r"bfloat16 for 'bias'.*gradient\.float\(\)"),
        (lambda n: None, r"returns NoneType for 'bias'"),
    ],
)
def test_results_that_do_not_fit_are_refused(change, message):
    network = nn.Sequential(registered(norm=changed(gate_norms, "bias", change))(5, 3))
    with pytest.raises(ValueError, match=message):
        backward(network)


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


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "per_sample"])
def test_several_inputs(mode):
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.marker, self.head = Marker(5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.marker(x, x.sum(-1, keepdim=True).gt(0).to(x.dtype)))

    network, batch = Tagged(), zoo.numbers(6, 4, 5, out=(4, 3))
    assert_step(private(copy.deepcopy(network), mode, C), network, batch, limit=C, tolerance=1e-4)
