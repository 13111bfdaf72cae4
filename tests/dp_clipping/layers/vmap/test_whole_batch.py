"""Modules that compute with parameters of their own without vmap, beside one sample at a time."""

import copy
import re
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dp_clipping.layers.vmap import whole_batch
from tests.dp_clipping.conftest import MODES, assert_step, clipped_sums, private
from tests.support import zoo
from tests.support.turns import in_turn
from tests.support.zoo import Net

SAMPLES = 4


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def scaled(run: Callable[[Net, Tensor], Tensor], **parameters: nn.Parameter) -> Callable:
    """Builds a module that runs so between two linear layers, and calls a third one."""

    def build() -> nn.Module:
        own = {name: copy.deepcopy(p) for name, p in parameters.items()}
        inner = Net(run, linear=nn.Linear(5, 5), **own)
        return Net(
            lambda net, x: net.last(net.inner(net.first(x))),
            first=nn.Linear(5, 5), inner=inner, last=nn.Linear(5, 2),
        )  # fmt: skip

    return build


def in_place(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x).clone()
    y *= net.scale
    return y.add_(net.scale)


def tokens(net: Net, x: Tensor) -> Tensor:
    first = net.token.expand(len(x), -1, -1)
    second = net.token.repeat(x.shape[0], 1, 1)
    return net.linear(torch.cat((first, x, second), 1) + net.positions[:, : x.shape[1] + 2])


def attention(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x).unsqueeze(1)
    return F.scaled_dot_product_attention(y, y, y, attn_mask=net.mask.tanh()).squeeze(1)


def relative(pick: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """Attention with a bias for each distance, and to tokens before alone."""

    def run(net: Net, x: Tensor) -> Tensor:
        y, steps = net.linear(x).unsqueeze(1), torch.arange(x.shape[1])
        biases = pick(net.table, steps[:, None] - steps + 3).permute([2, 0, 1]).unsqueeze(0)
        seen = torch.ones(biases.shape[1:], dtype=torch.bool).tril()
        mask = torch.where(seen, 0.5 * biases + biases, -1e9).contiguous()
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask).squeeze(1)

    return run


def repeated(net: Net, x: Tensor) -> Tensor:
    y = net.token.repeat(len(x), 1, 1)
    y[:, 0] = 0
    return net.linear(x + y)


def into_a_row(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x).clone()
    y[:, 0] = net.w
    return y


class Gained(Net):
    """A module whose parameter has an attribute, in copies of the module too."""

    def __setstate__(self, state):
        super().__setstate__(state)
        self.w.gain = 3.0


def gained(run: Callable[[Net, Tensor], Tensor]) -> Callable:
    def build() -> nn.Module:
        inner = Gained(run, linear=nn.Linear(5, 5), w=bare(5))
        inner.w.gain = 3.0
        return nn.Sequential(nn.Linear(5, 5), inner, nn.Linear(5, 2))

    return build


class Logarithm(nn.Parameter):
    """A parameter that is used by its exponential."""

    def positive(self) -> Tensor:
        return self.exp()


class Twice(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


torch.manual_seed(0)
# Samples [4, 5] of the batch, or [4, 4, 5] with as many tokens as samples
WITHOUT_VMAP = {
    "scale": (scaled(lambda n, x: x + n.scale * n.linear(x), scale=bare(5)), (5,)),
    "of tokens": (scaled(lambda n, x: n.linear(x) - n.positions, positions=bare(4, 5)), (4, 5)),
    "in place": (scaled(in_place, scale=bare(5)), (4, 5)),
    "of parameters alone": (
        scaled(lambda n, x: n.linear(x) * F.softplus(n.a * n.b).view(1, 1, -1) + -n.a.exp(),
               a=bare(5), b=bare(5)), (4, 5)),
    "several uses": (scaled(lambda n, x: n.scale * n.linear(n.scale * x) + n.scale, scale=bare(5)),
                     (4, 5)),
    "tokens that join": (scaled(tokens, token=bare(1, 1, 5), positions=bare(1, 9, 5)), (4, 5)),
    "time first": (
        scaled(lambda n, x: (n.linear(x.transpose(0, 1)) + n.p[:, None]).transpose(0, 1),
               p=bare(4, 5)), (4, 5)),
    "a product": (scaled(lambda n, x: n.linear(x) @ n.w, w=bare(5, 5)), (4, 5)),
    "flattened": (
        scaled(lambda n, x: (n.linear(x).flatten(0, 1) * n.w).unflatten(0, x.shape[:2]),
               w=bare(5)), (4, 5)),
    "several results": (
        scaled(lambda n, x: n.linear(x) * torch.linalg.qr(n.w)[0].diagonal() * len(n.w),
               w=bare(5, 5)), (4, 5)),
    "attention": (scaled(attention, mask=bare(4, 4)), (4, 5)),
    "rows of a table": (scaled(relative(lambda table, ids: F.embedding(ids, table)),
                               table=bare(7, 1)), (4, 5)),
    "an index": (scaled(relative(lambda table, ids: table[ids - 7]), table=bare(7, 1)), (4, 5)),
    "given to a layer": (
        scaled(lambda n, x: n.linear(x) + n.linear(n.table.expand(len(x), -1, -1)),
               table=bare(4, 5)), (4, 5)),
    "copies that are written to": (scaled(repeated, token=bare(4, 5)), (4, 5)),
}  # fmt: skip
WITHOUT_VMAP |= {
    "asks for its class": (
        scaled(lambda n, x: n.linear(x) * (n.w if isinstance(n.w, nn.Parameter) else 1), w=bare(5)),
        (5,)),
    "asks for an attribute": (
        gained(lambda n, x: n.linear(x) * n.w * getattr(n.w, "gain", 1.0)),
        (5,)),
    "gets it by name": (
        scaled(lambda n, x: n.linear(x) * n.get_parameter("w"), w=bare(5)), (5,)),
    "a class of its own": (
        scaled(lambda n, x: n.linear(x) * n.w.positive(), w=Logarithm(torch.randn(5))), (5,)),
}  # fmt: skip


def two_names() -> nn.Module:
    network = scaled(lambda n, x: n.linear(x) * n.w + n.twin, w=bare(5))()
    network.inner.twin = network.inner.w
    return network


UNDER_VMAP = {
    "one parameter of two names": (two_names, (4, 5)),
    "written to a row": (scaled(into_a_row, w=bare(5)), (4, 5)),
    "a function": (
        scaled(lambda n, x: n.linear(x) * Twice.apply(n.w), w=bare(5)), (4, 5)),
    "a row by class and attribute": (
        gained(lambda n, x: into_a_row(n, x) * n.w.gain * isinstance(n.w, nn.Parameter)), (4, 5)),
}  # fmt: skip


def again(run: Callable[[Net, Tensor], Tensor], **options) -> Callable[[Net, Tensor], Tensor]:
    """Computes in backward again what it computes in forward."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: run(net, x), x, use_reentrant=False, **options)

    return forward


CHECKPOINTED = {
    "with a layer": (scaled(again(lambda n, x: n.linear(x).tanh() * n.w), w=bare(5)), (4, 5)),
    "a product": (scaled(again(lambda n, x: (x @ n.w).tanh() @ n.w), w=bare(5, 5)), (4, 5)),
    "a row": (scaled(again(into_a_row), w=bare(5)), (4, 5)),
    "around a child": (
        lambda: Net(again(lambda n, x: n.child(x + n.w).tanh() * n.w), w=bare(5),
                    child=Net(lambda n, x: n.linear(x) * n.w, linear=nn.Linear(5, 5), w=bare(5))),
        (4, 5)),
}  # fmt: skip


def check(network: nn.Module, plain: nn.Module, shape: tuple, mode: str, steps: int = 1):
    """A private step beside the oracle; returns the states of modules with bare parameters."""
    model = private(network, mode, 0.5)
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(SAMPLES, *shape, dtype=torch.float64)
        batch = x, torch.randn_like(plain(x))
        assert_step(model, plain, batch, limit=0.5)
    return [handle for handle in model.capture.handles if handle.kind == "vectorized"]


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    return zoo.seeded(build).double(), zoo.seeded(build).double()


@pytest.mark.parametrize(("name", "mode"), in_turn(WITHOUT_VMAP, MODES))
def test_norms_and_sums_without_vmap(name, mode):
    build, shape = WITHOUT_VMAP[name]
    (handle,) = check(*twins(build), shape, mode, steps=2)
    assert handle.operations


@pytest.mark.parametrize("name", ["rows of a table", "an index"])
def test_a_bias_of_attention_is_computed_of_all_copies_at_once(name):
    build, shape = WITHOUT_VMAP[name]
    with patch.object(whole_batch, "_under_vmap", side_effect=AssertionError):
        (handle,) = check(*twins(build), shape, "bookkeeping", steps=2)
    assert handle.operations


@pytest.mark.parametrize("name", UNDER_VMAP)
def test_what_else_is_computed_runs_under_vmap(name):
    build, shape = UNDER_VMAP[name]
    (handle,) = check(*twins(build), shape, "bookkeeping")
    assert handle.operations is None


@pytest.mark.parametrize(("name", "mode"), in_turn(CHECKPOINTED, MODES))
def test_what_is_computed_again_in_backward(name, mode):
    build, shape = CHECKPOINTED[name]
    check(*twins(build), shape, mode, steps=2)


class Switched(nn.Module):
    """Checkpoints a part of its code when told to."""

    def __init__(self, run):
        super().__init__()
        self.w, self.linear, self.run, self.is_on = bare(5), nn.Linear(5, 5), run, False

    def forward(self, x):
        return again(self.run)(self, x) if self.is_on else self.run(self, x)


@pytest.mark.parametrize(
    "run", [lambda n, x: n.linear(x).tanh() * n.w, into_a_row], ids=["whole batch", "vmap"]
)
def test_checkpointing_turned_on_later_is_named(run):
    """Or right: torch 2.11 computes again what runs under vmap, which later ones cannot."""
    network = zoo.seeded(lambda: Switched(run)).double()
    model = private(network, "bookkeeping", 0.5)
    batch = torch.randn(2, SAMPLES, 3, 5, dtype=torch.float64).unbind()
    clipped_sums(model, batch)
    model.clear_gradients()
    network.is_on = True
    try:
        found = clipped_sums(model, batch)
    except ValueError as error:
        found = str(error)
    if isinstance(found, str):
        assert re.search(r"turned on after the first batch, .*reset_batch_layouts", found)
        return
    from_the_start = zoo.seeded(lambda: Switched(run)).double()
    from_the_start.is_on = True
    expected = clipped_sums(private(from_the_start, "bookkeeping", 0.5), batch)
    torch.testing.assert_close(found, expected)


class Asking(nn.Module):
    """Computes with what belongs to its parameter itself, and not to a copy of it.

    Args:
        run: on the whole batch, or under vmap.
        gain: module -> what its result is multiplied with.
        weight: module -> its weight in the run.
    """

    def __init__(self, run, gain=lambda net: 1.0, weight=lambda net: net.own):
        super().__init__()
        self.own, self.scale, self.linear = bare(5), bare(5), nn.Linear(5, 5)
        self.run, self.gain, self.weight = run, gain, weight
        self.key, self.gains, self.listed = id(self.own), {self.own: 3.0}, [self.scale]

    @property
    def w(self):
        return self.weight(self)

    def forward(self, x):
        return self.run(self, x) * self.gain(self)


def own_or_detached(net: nn.Module) -> Tensor:
    return net.own if id(net.own) == net.key else net.own.detach()


OTHERWISE = {
    "its id": {"gain": lambda net: 3.0 if id(net.own) == net.key else 1.0},
    "a dictionary of parameters": {"gain": lambda net: net.gains.get(net.own, 1.0)},
    "a list of parameters": {"gain": lambda net: net.listed[0]},
    "gradients alone": {"weight": own_or_detached},
}


@pytest.mark.parametrize(
    "run", [lambda n, x: n.linear(x) * n.w, into_a_row], ids=["whole batch", "vmap"]
)
@pytest.mark.parametrize(("name", "mode"), in_turn(OTHERWISE, MODES))
def test_a_module_that_asks_which_parameter_it_has_is_refused(name, run, mode):
    """Refuses it where results differ, and where gradients alone do."""
    network = nn.Sequential(nn.Linear(5, 5), Asking(run, **OTHERWISE[name])).double()
    model = private(network, mode, 0.5)
    with pytest.raises(ValueError, match=r"1 \(Asking\) computes otherwise .*by its name"):
        model(torch.randn(SAMPLES, 5, 5, dtype=torch.float64))


class Changing(nn.Module):
    """Computes otherwise from some call on, which the network's own clock says."""

    def __init__(self):
        super().__init__()
        self.first, self.scale, self.other = nn.Linear(5, 5), bare(5), False

    def forward(self, x):
        x = x.clone().mul_(self.scale)  # a second run would start from another value
        return self.first(x) @ self.scale if self.other else self.first(x) * self.scale


def test_a_module_that_computes_otherwise_later_is_looked_at_again():
    network, plain = twins(Changing)
    model, found = private(network, "bookkeeping", 0.5), []
    for other in (False, True, False):
        network.other = plain.other = other
        x = torch.randn(SAMPLES, 5, dtype=torch.float64)
        batch = x, torch.randn_like(plain(x))
        assert_step(model, plain, batch, limit=0.5)
        (handle,) = [h for h in model.capture.handles if h.kind == "vectorized"]
        found.append(len(handle.operations))
    assert found == [2, 3, 3]


def hidden(net: Net, x: Tensor) -> Tensor:
    """Leaves out a mask that hides nothing, as models of transformers do."""
    hides = x > 9
    scale = torch.where(hides, 0.5, net.scale) if bool(hides.any()) else net.scale
    return net.linear(x) * scale


@pytest.mark.parametrize("row", [0, 5])
def test_a_mask_is_left_out_where_it_hides_nothing(row):
    """Also where none of the samples that are looked at has one, and the batch has."""
    network, plain = twins(scaled(hidden, scale=bare(5)))
    model = private(network, "bookkeeping", 0.5)
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64)
    with torch.no_grad():
        for net in (network, plain):
            net.first.weight.copy_(torch.eye(5))
    x[row, 0] = 20
    batch = x, torch.randn_like(plain(x))
    assert_step(model, plain, batch, limit=0.5)


def sorted_by(run: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """Runs on the samples in the order of their first numbers, and puts them back."""

    def forward(net: Net, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return net.linear(run(net, x[order])[order.argsort()])

    return forward


def written(net: Net, x: Tensor) -> Tensor:
    x = x.clone()
    x *= net.scale
    return x


SORTED = {
    "an operand": lambda n, x: x * n.scale,
    "written to": written,
    "expanded": lambda n, x: n.scale.expand(len(x), 4, -1) * x,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SORTED)
def test_a_module_that_sorts_its_samples_runs_under_vmap(name, mode):
    """In the first batch they are sorted: there a sample has its own copy all the same."""
    build = lambda: Net(sorted_by(SORTED[name]), linear=nn.Linear(5, 2), scale=bare(5))  # noqa: E731
    network, plain = twins(build)
    model = private(network, mode, 0.5)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(SAMPLES, 4, 5, dtype=torch.float64)
        x = x if step else x[x[:, 0, 0].argsort()]
        batch = x, torch.randn(SAMPLES, 4, 2, dtype=torch.float64)
        assert_step(model, plain, batch, limit=0.5)
    (handle,) = [h for h in model.capture.handles if h.kind == "vectorized"]
    assert handle.operations is None


class Product(torch.autograd.Function):
    """x · w, with a gradient of w for which no operator with w is called."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.size = len(w)
        return x * w

    @staticmethod
    def backward(ctx, gradients):
        (x,) = ctx.saved_tensors
        return gradients, (gradients * x).reshape(-1, ctx.size).sum(0)


class Saving(Product):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradients):
        x, w = ctx.saved_tensors
        return gradients * w, (gradients * x).sum(0)


UNSEEN = {
    "a function": lambda x, w: Product.apply(x, w),
    "a function that saves it": lambda x, w: Saving.apply(x, w),
    "a copy": lambda x, w: x * w * torch.as_tensor(w, dtype=torch.float32).sum(),
}


class Hiding(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.scale, self.run, self.hides = nn.Linear(5, 5), bare(5), run, False

    def forward(self, x):
        x = self.linear(x)
        return self.run(x, self.scale) if self.hides else x * self.scale


@pytest.mark.parametrize("name", UNSEEN)
def test_a_gradient_that_does_not_come_to_the_copies_is_refused(name):
    network = zoo.seeded(lambda: Hiding(UNSEEN[name])).double()
    model = private(network, "bookkeeping", 0.5)
    batch = torch.randn(2, SAMPLES, 5, dtype=torch.float64).unbind()
    clipped_sums(model, batch)
    model.clear_gradients()
    model.skip_checks()
    network.hides = True
    with pytest.raises(RuntimeError, match=r"the network \(Hiding\) computes .*reset_batch_layou"):
        clipped_sums(model, batch)


def test_dropout_of_a_parameter_differs_between_samples():
    network = Net(lambda n, x: x * F.dropout(n.scale, 0.5, n.training), scale=bare(64)).double()
    model = private(network, "per_sample", 1e6)
    clipped_sums(model, (torch.ones(9, 64).double(), torch.ones(9, 64).double()))
    (handle,) = model.capture.handles
    assert handle.operations
    found = network.scale.grad  # the number of samples in which it was kept, times two
    assert set(found.tolist()) <= {2.0 * n for n in range(10)}
    assert len(found.unique()) > 3
