"""Modules that cannot run on the whole batch are found before a step, and trials leave no trace."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dp_clipping.capture import vmap_trial
from dp_clipping.capture.callers import Uses
from dp_clipping.capture.capture import Capture
from dp_clipping.capture.layout_search import Search
from dp_clipping.capture.vmap_trial import unfit_modules
from dp_clipping.layers.batch_layout import Layout, NeedsVmap
from dp_clipping.layers.vmap.whole_batch import Operation, learn
from dp_clipping.torch_compat import transforms_run
from tests.dp_clipping.conftest import private
from tests.support.zoo import Net


def owner(function, **members) -> nn.Module:
    members = {"a": nn.Linear(3, 3), "scale": nn.Parameter(torch.randn(3)), **members}
    return nn.Sequential(Net(function, **members), nn.Linear(3, 2))


def searched(network: nn.Module, is_whole: bool = False) -> tuple[Capture, tuple, tuple]:
    """Finds where the samples are; `is_whole`: modules with bare parameters run on all of them."""
    capture = Capture(network)
    if is_whole:
        capture.make_whole([h for h in capture.handles if h.kind == "vectorized"])
    few, more, other = (
        ((torch.ones(n, 3) if is_whole else torch.randn(n, 3),), {}) for n in (2, 3, 2)
    )
    Search(capture).establish(few, more, other, lambda: None)
    return capture, few, more


def tried(network: nn.Module) -> dict[str, str]:
    """Names of the modules that cannot run on the whole batch, and why."""
    return {handle.name: handle.whole_because for handle in unfit_modules(*searched(network))}


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.a(x) * net.scale,
        lambda net, x: net.a(x.to(net.a.weight.dtype)) * net.scale,
        lambda net, x: net.a(x) * net.scale + torch.rand(len(x), 3),
        lambda net, x: net.a(x + net.scale).add_(1),
        lambda net, x: net.a(x) + net.a(net.scale),  # which is given a row for each sample
        lambda net, x: net.a(x) * net.scale * float(net.scale.sum()),
        lambda net, x: net.a(x).clamp(min=float(x.detach().max())) * net.scale,
    ],
)
def test_fit(function):
    assert tried(owner(function)) == {}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda net, x: net.a(x) * (net.scale if len(x) > 2 else 2 * net.scale * x),
            "another size",
        ),
        (lambda net, x: net.a(x) * rounded(net.scale), "does not run beside copies"),
        (lambda net, x: net.a(with_first(x, net.scale)), "__setitem__ writes"),
        (lambda net, x: net.a(x) + sum(n * net.scale * torch.ones(3) for n in range(40)), "many"),
    ],
)
def test_unfit(function, why):
    found = tried(owner(function))
    assert found.keys() == {"0"}
    assert why in found["0"]


class Rounded(torch.autograd.Function):
    """Does not tell PyTorch which operators it is made of."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().as_subclass(torch.Tensor).round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def with_first(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns x · w with another first column, which no operator on the whole batch writes."""
    y = x * scale
    y[:, 0] = scale[0]
    return y


def rounded(scale: torch.Tensor) -> torch.Tensor:
    return Rounded.apply(scale)


def test_fit_where_it_is_called_twice():
    """Gradients of the second call end where its arguments begin."""
    block = owner(lambda net, x: net.a(x) * net.scale)[0]
    assert tried(nn.Sequential(block, nn.Tanh(), block, nn.Linear(3, 2))) == {}


def test_gradients_of_tokens_in_the_place_of_samples_are_noticed(monkeypatch):
    def wrong(known, few, more):
        everything = learn(known, few, more)
        known |= {
            key: Operation((Layout("dimension", 1),), one.outputs) for key, one in known.items()
        }
        return everything

    monkeypatch.setattr(vmap_trial, "learn", wrong)
    network = owner(lambda net, x: (net.a(x)[:, None].expand(-1, 2, -1) * net.scale).sum(1))
    assert "gradients are not those" in tried(network)["0"]


def test_a_limited_capacity_is_refused_under_vmap():
    network = nn.Sequential(Net(lambda net, x: x[: len(x) // 2 + 1].sum(0) + x * net.w,
                                    w=nn.Parameter(torch.ones(3))))  # fmt: skip
    given = searched(network, is_whole=True)
    with pytest.raises(NeedsVmap, match="computes otherwise of one sample"):
        unfit_modules(*given)


def test_a_random_module_may_compute_otherwise_under_vmap():
    """It draws once for the batch, and there once for each sample."""
    network = nn.Sequential(Net(lambda net, x: x * net.w * torch.rand(3),
                                    w=nn.Parameter(torch.ones(3))))  # fmt: skip
    assert unfit_modules(*searched(network, is_whole=True)) == []


def test_what_a_trial_keeps_is_freed():
    """Also where a node keeps its own output, as that of tanh does."""
    kept = []

    def forward(net, x):
        y = torch.tanh(net.a(x) * net.scale)
        kept.append(weakref.ref(y))
        return y

    tried(owner(forward))
    gc.collect()
    assert len(kept) > 3
    assert not any(y() is not None for y in kept)


def test_nothing_to_try():
    network = nn.Sequential(nn.Linear(3, 2))
    network[0].register_forward_hook(lambda *_: pytest.fail("no forward is needed"))
    capture = Capture(network)
    assert unfit_modules(capture, *[((torch.randn(n, 3),), {}) for n in (2, 3)]) == []


def test_rows_that_no_argument_counts():
    """Rows that are the same for each sample, for so many of them, as in Perceiver."""
    rows = Net(lambda net, count: net.rows.expand(count, -1), rows=nn.Parameter(torch.randn(1, 4)))
    latents = Net(lambda net, x: net.latents(len(x)).sum(1, True) + x, latents=rows)
    assert tried(latents) == {}
    with pytest.raises(
        NeedsVmap, match="latents returns rows for each sample, and none of its arg"
    ):
        searched(latents, is_whole=True)


def test_who_calls_a_layer():
    network = owner(lambda net, x: net.a(x) * net.scale)
    capture, arguments = Capture(network), ((torch.randn(2, 3),), {})
    assert Uses(capture, arguments).callers_of({"0.a"}) == [network[0]]
    assert Uses(capture, arguments).callers_of({"1"}) == [network]
    assert Uses(capture, arguments).callers_of({""}) == []


@pytest.mark.parametrize(
    ("function", "is_read"),
    [
        (lambda net, x: x @ net.a.weight, True),
        (lambda net, x: net.a(x) @ net.a.weight, True),  # it is called as well
        (lambda net, x: x * net.a.weight.detach().sum(), False),
        (lambda net, x: x.to(net.a.weight.dtype) * len(net.a.weight), False),
        (lambda net, x: net.a(x), False),
    ],
)
def test_weights_that_other_code_reads(function, is_read):
    network = owner(function)
    found = Uses(Capture(network), ((torch.randn(2, 3),), {})).weights_read_elsewhere()
    weight = network[0].a.weight
    assert list(found) == [network[0]] * is_read
    own = {weight, network[0].a.bias}
    assert all(weight in weights and own.issuperset(weights) for weights in found.values())


def test_the_weight_of_a_called_layer_is_not_read_by_a_module_without_parameters():
    network = Net(lambda net, x: net.a(x) @ net.a.weight, a=nn.Linear(3, 3))
    assert Uses(Capture(network), ((torch.randn(2, 3),), {})).weights_read_elsewhere() == {}


class Failing(nn.Module):
    """Cannot run under vmap, as it finds out half-way through a list that it fills."""

    def __init__(self, run=with_first, also_alone=False):
        super().__init__()
        self.scale, self.kept = nn.Parameter(torch.ones(3)), []
        self.run, self.also_alone = run, also_alone

    def forward(self, x):
        if self.kept:
            raise AssertionError("a call before this one has left something")
        self.kept.append(x.shape)
        if transforms_run() or (self.also_alone and len(x) == 1):
            raise RuntimeError("vmap: for one sample")
        y = self.run(x, self.scale)
        self.kept.clear()
        return y


class Once(nn.Module):
    """As if memory were full under vmap, and not for single samples."""

    def __init__(self, error):
        super().__init__()
        self.scale, self.error = nn.Parameter(torch.ones(3)), error

    def forward(self, x):
        if transforms_run():
            raise self.error
        return with_first(x, self.scale)


MEMORY = (
    torch.OutOfMemoryError("full"),
    MemoryError("full"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
)


@pytest.mark.parametrize("error", MEMORY, ids=lambda error: type(error).__name__)
def test_errors_of_memory_are_passed_on(error):
    """And are no reason to take one sample after another."""
    network = nn.Sequential(nn.Linear(3, 3), Once(error))
    with pytest.raises(type(error), match=r"full|can't allocate"):
        private(network)(torch.randn(4, 3))
    assert network[1]._private.one_by_one == ""


class Signs(torch.autograd.Function):
    """Computes with operators, and has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.sign() + 0

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("run", [with_first, lambda x, scale: x * Signs.apply(scale)])
def test_what_fails_half_way_leaves_nothing_to_the_call_after_it(run):
    """In the comparison, or when operators are noted."""
    network = nn.Sequential(nn.Linear(3, 3), Failing(run))
    assert len(private(network)(torch.randn(4, 3))) == 4
    assert "for one sample" in network[1]._private.one_by_one
    assert network[1].kept == []


def test_a_plain_call_after_one_that_fails_finds_nothing():
    network = nn.Sequential(nn.Linear(3, 3), Failing(also_alone=True))
    given = searched(network, is_whole=True)
    for _ in range(2):
        assert unfit_modules(*given) == []
        assert network[1].kept == []
