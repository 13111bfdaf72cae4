"""A function that is wrong is refused before its gradients are clipped."""

import pytest
import torch
from torch import nn

from dp_clipping import LinearProduct, PrivacyEngine, register_layer
from dp_clipping.trials.schedule import LEVELS
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.engine import CLASSES, build, data, step
from tests.support.registered_layers import Gate, gate_gradients, gate_norms, gate_sums


def registered(fn=None, **functions) -> type[Gate]:
    """Returns a new class with this function, or with one of norms and one of sums."""
    kind = type("Wrong", (Gate,), {})
    both = {"norm": gate_norms, "weighted_sum": gate_sums} | functions
    register_layer(kind, fn, **(both if fn is None else {}))
    return kind


def backward(network: nn.Module, batch=None, model=None) -> None:
    model = private(network) if model is None else model
    batch = zoo.numbers(6, 4, 5, out=(4, 3)) if batch is None else batch
    private_loss(model, batch, zoo.product).backward()


def changed(name: str, change, fn=gate_gradients):
    def wrong(*args):
        found = fn(*args)
        return found | {name: change(found[name])}

    return wrong


def of_product(change):
    return changed("weight", lambda p: LinearProduct(p.activations, change(p.gradients)))


def of_norm(name: str, change) -> type[Gate]:
    return registered(norm=changed(name, change, gate_norms))


def of_coefficients(weigh) -> type[Gate]:
    """Sums the gradients with other coefficients than it is given."""
    return registered(weighted_sum=lambda layer, g, c, x: gate_sums(layer, g, weigh(c), x))


GRADIENTS = {
    "a factor": changed("bias", lambda g: 1.01 * g),
    "a zero": changed("scale", torch.zeros_like),
    "another sample's": changed("bias", lambda g: g.roll(1, 0)),
    "the batch's mean": changed("scale", lambda g: g - g.mean(0)),
    "not a number": changed("bias", lambda g: g * float("nan")),
    "last sample": changed("bias", lambda g: torch.cat((g[:-1], g[-1:] * 2))),
    "a product's factor": of_product(lambda y: y * 0.9),
    "a product's tokens": of_product(lambda y: y.flip(1)),
}
WRONG = {
    **{name: lambda fn=fn: registered(fn) for name, fn in GRADIENTS.items()},
    "a norm below": lambda: of_norm("weight", lambda n: n * 0.9999),
    "a norm above": lambda: of_norm("bias", lambda n: n * 1.01),
    "a squared norm": lambda: of_norm("scale", torch.square),
    "the batch's norm": lambda: of_norm("scale", lambda n: n.mean().repeat(6)),
    "no number": lambda: of_norm("bias", lambda n: n * float("nan")),
    "a sum's factor": lambda: registered(
        weighted_sum=changed("weight", lambda g: g * 1.1, gate_sums)
    ),
    "squared coefficients": lambda: of_coefficients(torch.square),
    "divided coefficients": lambda: of_coefficients(lambda c: c / c.sum()),
    "coefficients left out": lambda: of_coefficients(lambda c: (c > 0).to(c.dtype)),
    "coefficients of other samples": lambda: of_coefficients(lambda c: c.flip(0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_refused(name):
    """Before anything is clipped: the message names the layer and the parameter."""
    network = nn.Sequential(nn.Linear(5, 5), WRONG[name]()(5, 3))
    model = private(network, max_grad_norm=0.05)
    message = r"(function|norm|weighted_sum) registered for 1 \(Wrong\) is wrong: for '\w+'"
    with pytest.raises(ValueError, match=message):
        backward(network, model=model)
    assert all(p.grad is None for p in network.parameters())


def with_bias(value):
    return changed("bias", lambda _: value)


def norm_of_bias(change) -> type[Gate]:
    return of_norm("bias", change)


UNFIT = {  # what is said -> a class whose function returns what does not fit
    "returns list: return a dictionary": lambda: registered(lambda layer, g, x: [g]),
    "returns NoneType for 'scale'": lambda: registered(
        lambda *a: dict(list(gate_gradients(*a).items())[:2])
    ),
    r"\[1, 4\] for 'bias'": lambda: registered(with_bias(torch.zeros(1, 4))),
    "NoneType for 'bias'": lambda: registered(with_bias(None)),
    "int64 for 'bias'": lambda: registered(with_bias(torch.zeros(1, 3, dtype=torch.long))),
    r"return LinearProduct\(a": lambda: registered(changed(
        "weight", lambda _: LinearProduct(torch.zeros(1, 2, 3), torch.zeros(1, 2, 5))
    )),
    r"returns \[1\] for 'bias': return a tensor \[6\]": lambda: norm_of_bias(lambda n: n[:1]),
    r"bfloat16 for 'bias'.*gradient\.float\(\)": lambda: norm_of_bias(lambda n: n.bfloat16()),
    "returns NoneType for 'bias'": lambda: norm_of_bias(lambda n: None),
}  # fmt: skip


@pytest.mark.parametrize("message", UNFIT)
def test_what_a_function_must_return(message):
    with pytest.raises(ValueError, match=message):
        backward(nn.Sequential(UNFIT[message]()(5, 3)))


def test_a_layer_that_returns_two_tensors_is_refused():
    kind = type("Two", (Gate,), {"forward": lambda self, x: (x * self.scale, self.bias)})
    register_layer(kind, gate_gradients)
    network = zoo.Net(lambda net, x: net.two(x)[0], two=kind(3, 3))
    with pytest.raises(ValueError, match=r"two \(Two\) returns 2 tensors"):
        backward(network, zoo.numbers(4, 3, out=(3,)))


def test_a_right_one_is_not():
    backward(nn.Sequential(nn.Linear(5, 5), registered(gate_gradients)(5, 3)))


def test_a_mistake_that_shows_later_is_found_then():
    """Backwards 1, 2, 4, 8 are looked at."""
    calls, wrong_from = [], 3

    def fn(layer, gradient, x):
        if gradient.count_nonzero():  # not the call that asks for shapes
            calls.append(len(x))
        found = gate_gradients(layer, gradient, x)
        return found | {"bias": found["bias"] * (2 if len(calls) >= wrong_from else 1)}

    network = registered(fn)(5, 3)
    model = private(network)
    for _ in range(3):
        backward(network, model=model)
    with pytest.raises(ValueError, match="is wrong: for 'bias'"):
        backward(network, model=model)


@pytest.mark.filterwarnings("ignore:the batch of this step did not come from")
@pytest.mark.parametrize("checks", LEVELS)
def test_a_check_compares_a_function_at_each_level(checks):
    """Does so in each call, and takes no comparison from the steps."""
    factor = torch.ones(())
    layer = registered(changed("bias", lambda g: g * factor))(4, CLASSES)
    run = build(engine=PrivacyEngine(checks=checks), module=nn.Sequential(layer))
    assert run.engine.check(run.model, data()[:5])
    run.model.capture.make_whole(())  # layers get a new state
    factor.fill_(2)
    if checks == "off":
        step(run)
    else:
        with pytest.raises(ValueError, match="is wrong: for 'bias'"):
            step(run)
    with pytest.raises(ValueError, match="is wrong: for 'bias'"):
        run.engine.check(run.model, data()[:5])


def test_gradients_of_zero_settle_nothing():
    """As of a layer before one that starts as zeros."""
    head = nn.Linear(3, 3)
    nn.init.zeros_(head.weight)
    layer = registered(changed("bias", lambda g: 2 * g))(5, 3)
    network = nn.Sequential(layer, head)
    model = private(network)
    for _ in range(4):
        backward(network, model=model)
    nn.init.ones_(head.weight)
    with pytest.raises(ValueError, match="is wrong: for 'bias'"):
        backward(network, model=model)


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_gradients_that_cancel_are_rounding_errors(wrong):
    """As of a bias before a softmax over tokens: the function adds them in another order."""

    def fn(layer, gradient, x):
        found = gate_gradients(layer, gradient, x)
        y = found["weight"].gradients
        return found | {"bias": y.flip(1).cumsum(1)[:, -1] + wrong}

    layer = registered(fn)(5, 3)
    torch.nn.init.zeros_(layer.weight)  # tokens have one output, whose gradients add up to nothing
    network = zoo.Net(lambda net, x: (y := net.layer(x)) - y.mean(1, keepdim=True), layer=layer)
    batch = zoo.numbers(6, 99, 5, out=(99, 3))
    if not wrong:
        backward(network, batch)
        return
    with pytest.raises(ValueError, match="is wrong: for 'bias'"):
        backward(network, batch)


def test_16_bit_rounding_is_no_mistake_and_a_third_is():
    batch = zoo.numbers(6, 4, 5, out=(4, 3))
    batch = tuple(x.bfloat16() for x in batch)
    backward(registered(gate_gradients)(5, 3).bfloat16(), batch)
    with pytest.raises(ValueError, match="is wrong"):
        backward(registered(changed("scale", lambda g: 1.3 * g))(5, 3).bfloat16(), batch)


class Noisy(Gate):
    def forward(self, x):
        return super().forward(x) * torch.rand(x.shape[0], *[1] * (x.dim() - 1))


def test_a_random_layer_is_refused():
    register_layer(Noisy, gate_gradients)
    with pytest.raises(ValueError, match="draws random numbers cannot be registered"):
        backward(Noisy(5, 3))
