"""Modules that cannot leave their child layers outside of vmap are found in one forward."""

import pytest
import torch
from torch import nn

from dp_clipping.capture.capture import Capture
from dp_clipping.capture.layout_search import Search
from dp_clipping.capture.vmap_trial import unfit_modules
from dp_clipping.layers.batch_layout import FEW
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
    ],
)
def test_unfit(function):
    assert tried(owner(function)) == ["0"]


def test_nothing_to_try():
    network = nn.Sequential(nn.Linear(3, 2))
    network[0].register_forward_hook(lambda *_: pytest.fail("no forward is needed"))
    capture = Capture(network)
    assert unfit_modules(capture, ((torch.randn(2, 3),), {}), FEW) == []
