"""Modules that cannot leave their child layers outside of vmap are found in one forward."""

import pytest
import torch
from torch import nn

from dp_clipping.capture.capture import Capture
from dp_clipping.capture.layout_search import Search
from dp_clipping.capture.vmap_trial import callers_of, unfit_modules, weights_read_elsewhere
from dp_clipping.layers.batch_layout import FEW
from dp_clipping.layers.handle import NeedsVmap
from dp_clipping.torch_compat import in_transform
from tests.dp_clipping.conftest import private
from tests.support import zoo
from tests.support.zoo import Net


def owner(function, **members) -> nn.Module:
    members = {"a": nn.Linear(3, 3), "scale": nn.Parameter(torch.randn(3)), **members}
    return nn.Sequential(Net(function, **members), nn.Linear(3, 2))


def tried(network: nn.Module) -> list[str]:
    """Names of the modules that are unfit."""
    capture = Capture(network)
    arguments = [((torch.randn(n, 3),), {}) for n in (2, 3, 2)]
    Search(capture).establish(*arguments)
    found = unfit_modules(capture, arguments[0], FEW)
    assert all(handle.trial is None for handle in capture.handles)
    return [handle.name for handle in found]


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.a(x) * net.scale,
        lambda net, x: net.a(x.to(net.a.weight.dtype)) * net.scale,
        lambda net, x: net.a(x) * net.scale + torch.rand(len(x), 3),
        lambda net, x: net.a(x + net.scale).add_(1),
    ],
)
def test_fit(function):
    assert tried(owner(function)) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: nn.functional.linear(x, net.a.weight) * net.scale,  # a child's weight
        lambda net, x: net.a(x) * net.a.weight.detach().sum() * net.scale,
        lambda net, x: net.a(x) + net.a(net.scale),  # no sample
        lambda net, x: net.a(x) * (net.scale if len(x) > 1 else 2 * net.scale),  # other values
        lambda net, x: net.a(x) * net.scale * float(net.scale.sum()),  # cannot run
        lambda net, x: net.a(x - x.mean(0)) * net.scale,  # other values for the child
        lambda net, x: net.a(x) * net.scale if len(x) > 1 else net.a(net.a(x)) * net.scale,
    ],
)
def test_unfit(function):
    assert tried(owner(function)) == ["0"]


def test_nothing_to_try():
    network = nn.Sequential(nn.Linear(3, 2))
    network[0].register_forward_hook(lambda *_: pytest.fail("no forward is needed"))
    capture = Capture(network)
    assert unfit_modules(capture, ((torch.randn(2, 3),), {}), FEW) == []


def test_rows_that_no_argument_counts():
    with pytest.raises(
        NeedsVmap, match="latents returns rows for each sample, and none of its arg"
    ):
        tried(zoo.Net(lambda net, x: net.latents(len(x)).sum(1, True) + x, latents=zoo.Latents()))


def test_who_calls_a_layer():
    network = owner(lambda net, x: net.a(x) * net.scale)
    capture, arguments = Capture(network), ((torch.randn(2, 3),), {})
    assert callers_of(capture, arguments, {"0.a"}) == [network[0]]
    assert callers_of(capture, arguments, {"1"}) == [network]
    assert callers_of(capture, arguments, {""}) == []


@pytest.mark.parametrize(
    ("function", "is_read"),
    [
        (lambda net, x: x @ net.a.weight, True),
        (lambda net, x: net.a(x) @ net.a.weight, False),  # it is called as well
        (lambda net, x: x * net.a.weight.detach().sum(), False),
        (lambda net, x: x.to(net.a.weight.dtype) * len(net.a.weight), False),
        (lambda net, x: net.a(x), False),
    ],
)
def test_weights_that_other_code_reads(function, is_read):
    network = owner(function)
    found = weights_read_elsewhere(Capture(network), ((torch.randn(2, 3),), {}))
    weight = network[0].a.weight
    assert list(found) == [network[0]] * is_read
    assert all(x is weight for weights in found.values() for x in weights)


class Failing(nn.Module):
    """Cannot run under vmap, as it finds out half-way through a list that it fills."""

    def __init__(self, also_alone=False):
        super().__init__()
        self.scale, self.kept = nn.Parameter(torch.ones(3)), []
        self.also_alone = also_alone

    def forward(self, x):
        if self.kept:
            raise AssertionError("a call before this one has left something")
        self.kept.append(x.shape)
        if in_transform() or (self.also_alone and len(x) == 1):
            raise RuntimeError("vmap: for one sample")
        self.kept.clear()
        return x * self.scale


class Once(nn.Module):
    """As if memory were full under vmap, and not for single samples."""

    def __init__(self, error):
        super().__init__()
        self.scale, self.error = nn.Parameter(torch.ones(3)), error

    def forward(self, x):
        if in_transform():
            raise self.error
        return x * self.scale


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


def test_what_fails_half_way_leaves_nothing_to_the_call_after_it():
    network = nn.Sequential(nn.Linear(3, 3), Failing())
    assert len(private(network)(torch.randn(4, 3))) == 4
    assert "for one sample" in network[1]._private.one_by_one
    assert network[1].kept == []


def test_a_plain_call_after_one_that_fails_finds_nothing():
    assert tried(nn.Sequential(nn.Linear(3, 3), Failing(also_alone=True))) == []
