"""Whose parameters are whose, and which children are captured themselves."""

import torch
from torch import nn

from dp_clipping.capture.capture import Capture
from tests.support.zoo import Net


def states(network: nn.Module, whole: bool = False) -> dict[str, tuple[str, bool, tuple]]:
    capture = Capture(network)
    if whole:
        capture.make_whole(capture.apart)
    found = {h.name: (h.kind, h.children_apart, h.trainable) for h in capture.handles}
    capture.remove()
    return found


def block(**members) -> nn.Module:
    return Net(None, scale=nn.Parameter(torch.ones(3)), **members)


def test_children_are_captured_themselves_or_with_their_parent():
    network = block(
        layers=nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU())]), act=nn.ReLU(),
        frozen=nn.Linear(3, 3).requires_grad_(False),
    )  # fmt: skip
    linear = ("linear", False, ("weight", "bias"))
    assert states(network) == {
        "": ("vectorized", True, ("scale",)), "layers.0.0": linear,
    }  # fmt: skip
    everything = ("scale", "layers.0.0.weight", "layers.0.0.bias")
    assert states(network, whole=True) == {"": ("vectorized", False, everything)}
    assert not any("forward" in vars(m) for m in network.modules())


def test_parameters_with_several_names():
    """A module captures all names that it has for them; a layer its own use of them."""
    own = nn.Linear(3, 3)
    tied = block(a=own, b=nn.Linear(3, 3))
    tied.again = own.weight
    assert states(tied)[""] == ("vectorized", True, ("scale", "again"))
    assert states(tied)["a"] == ("linear", False, ("weight", "bias"))
    several = block(a=nn.Linear(3, 3))
    several.other = several.scale
    assert states(several)[""] == ("vectorized", True, ("scale", "other"))


def test_what_is_under_vmap_as_a_whole():
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    without = block(a=nn.Linear(3, 3).requires_grad_(False), b=nn.ReLU())
    for network in (parametrized, without):
        assert not any(is_apart for _, is_apart, _ in states(network).values())


def test_lists_of_parameters_are_a_modules_own():
    network = Net(None, shifts=nn.ParameterList([torch.ones(2)]), a=nn.Linear(2, 2))
    assert states(network)[""] == ("vectorized", True, ("shifts.0",))
