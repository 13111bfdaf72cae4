"""Which arithmetic a layer gets: its class's, unless something of it was replaced."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.capture.layer_kinds import kind_of
from dp_clipping.capture.ownership import replaced_methods
from tests.dp_clipping.capture.test_capture import assert_step_is_right
from tests.dp_clipping.conftest import clipped_sums, private
from tests.support import zoo


class Masked(nn.Linear):
    """Its weight is read through a property."""

    @property
    def weight(self) -> Tensor:
        if "weight" not in self._parameters:
            raise AttributeError("weight")
        return self._parameters["weight"] * torch.arange(5.0)


def scaled(layer: nn.Module) -> nn.Module:
    def forward(self, x):
        return 3 * type(self).forward(self, x)

    layer.forward = types.MethodType(forward, layer)
    return layer


def standardised(layer: nn.Module) -> nn.Module:
    """A convolution whose weight is standardised by the method that its forward calls."""

    def convolution(x, weight, bias):
        return F.conv1d(x, weight - weight.mean(), bias, padding=1)

    layer._conv_forward = convolution
    return layer


REPLACED = {
    "a linear layer": lambda: scaled(nn.Linear(5, 5)),
    "a convolution": lambda: scaled(nn.Conv1d(6, 6, 3, padding=1)),
    "what a convolution calls": lambda: standardised(nn.Conv1d(6, 6, 3, padding=1)),
    "a group norm": lambda: scaled(nn.GroupNorm(2, 6)),
    "a layer norm": lambda: scaled(nn.LayerNorm(5)),
    "an RMS norm": lambda: scaled(nn.RMSNorm(5)),
}


@pytest.mark.parametrize("mode", ["per_sample", "bookkeeping", "ghost"])
@pytest.mark.parametrize("name", REPLACED)
def test_what_replaces_a_method_is_what_is_differentiated(name, mode):
    layer = zoo.seeded(REPLACED[name])
    assert kind_of(layer) == "vectorized"
    plain = zoo.seeded(REPLACED[name])  # not a copy: functions keep the layer that they are of
    batch = zoo.numbers(4, 6, 5, out=(6, 5))
    model = private(nn.Sequential(layer), mode)
    assert_step_is_right(model, nn.Sequential(plain), batch, loss=zoo.squared_error)


def test_an_embedding_whose_forward_was_replaced():
    build = lambda: nn.Sequential(scaled(nn.Embedding(7, 5)))  # noqa: E731
    network, plain = zoo.seeded(build), zoo.seeded(build)
    batch = (torch.randint(7, (4, 6)), torch.randn(4, 6, 5))
    assert_step_is_right(private(network), plain, batch, loss=zoo.squared_error)


@pytest.mark.parametrize(
    "replace",
    [
        lambda layer: setattr(layer, "forward", lambda x: x),
        lambda layer: setattr(layer, "_conv_forward", lambda x, *_: x),
        lambda layer: setattr(layer, "__class__", type("Conv", (nn.Conv1d,), {})),
    ],
    ids=["forward", "what it calls", "class"],
)
def test_a_method_that_is_replaced_afterwards_is_named(replace):
    network = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1))
    model, batch = private(network), zoo.numbers(4, 6, 5, out=(6, 5))
    clipped_sums(model, batch)
    replace(network[0])
    with pytest.raises(RuntimeError, match=r"of 0 .* was replaced after make_private"):
        clipped_sums(model, batch)


def test_a_network_gets_its_own_forwards_back():
    network = nn.Sequential(scaled(nn.Linear(5, 5)), nn.Linear(5, 5))
    own = network[0].forward
    private(network).to_standard_module()
    assert network[0].forward is own
    assert "forward" not in vars(network[1])


def test_a_weight_that_a_property_computes_is_refused():
    with pytest.raises(ValueError, match="Masked reads its weight or bias through a property"):
        private(nn.Sequential(Masked(5, 5)))


def test_attributes_are_no_methods():
    layer = copy.deepcopy(nn.Linear(3, 3))
    layer.helper = print
    assert not replaced_methods(layer)
    assert kind_of(layer) == "linear"
