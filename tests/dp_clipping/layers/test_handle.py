"""What a captured layer carries: slots, layouts, and checks of its inputs."""

import pytest
import torch
from torch import nn

from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import (
    LayerState,
    LayoutUnknown,
    autocast_operands,
    check_size,
    deliver,
    expand_shared,
    product_dtype,
)
from dp_clipping.modes import Policy
from tests.dp_clipping.conftest import trained


class Recorder:
    """As much of a private step as a layer's state asks."""

    batch_size, examples_per_unit, policy, is_compiled = 4, 1, Policy(), False

    def __init__(self):
        self.made, self.given = [], []
        self.plans = self

    def slot(self, parameter):
        self.made.append(parameter)
        return torch.zeros(4, *parameter.shape)

    def join(self, parameter):
        return "behind all uses"

    def join_factors(self, parameter, factors):
        self.given.append(("one of several", factors))

    def factors(self, parameter, factors):
        self.given.append((parameter, factors))

    def dense(self, parameter, gradients):
        self.given.append((parameter, gradients))

    def prefers_dense(self, tokens, outputs, inputs):
        return tokens * (inputs + outputs) > inputs * outputs


@pytest.fixture
def state():
    linear = nn.Linear(3, 2)
    layer = LayerState("a.b", "linear", linear, ("weight",), {"weight": trained(linear.weight)})
    layer.private_step = Recorder()
    return layer


def test_a_slot_is_made_once_and_only_for_what_is_trained(state):
    assert state.slot("weight") is state.slot("weight")
    assert len(state.private_step.made) == 1
    assert state.slot("bias") is None


def test_gradients_go_to_the_step_or_to_the_slot(state):
    trigger, target = state.gradient_target("weight")
    target("G")
    assert trigger is state.parameter("weight").trigger
    assert state.private_step.given == [(state.parameter("weight"), "G")]
    state.always_dense = True
    slot, target = state.gradient_target("weight")
    assert slot is state.slot("weight")
    assert target is None
    assert state.gradient_target("bias") == (None, None)


def test_factors_go_to_the_step_or_are_joined_first(state):
    trigger, take = state.factor_target("weight")
    take("factors")
    assert trigger is state.parameter("weight").trigger
    assert state.private_step.given == [(state.parameter("weight"), "factors")]
    state.joined = frozenset({"weight"})
    trigger, take = state.factor_target("weight")
    take("factors")
    assert trigger == "behind all uses"
    assert state.private_step.given[1:] == [("one of several", "factors")]


def test_delivery():
    given = []
    assert deliver(given.append, "G") is None
    assert deliver(None, "G") == "G"
    assert given == ["G"]


def test_an_input_of_unknown_shape_is_named(state):
    with pytest.raises(LayoutUnknown, match=r"a\.b"):
        state.batched(torch.zeros(4, 3))


def test_a_shared_input_gets_a_batch(state):
    state.layouts[(2,)] = (Layout("shared", 1),)
    layout, x = state.batched(torch.arange(3.0)[None])
    assert layout == Layout("dimension", 0)
    assert x.shape == (4, 3)
    assert expand_shared(torch.arange(3.0), 4).shape == (4, 3)
    assert expand_shared(torch.zeros(2, 3), 4).shape == (4, 2, 3)


@pytest.mark.parametrize(
    ("layout", "right", "wrong"),
    [
        (Layout("dimension", 0), (4, 3), (3, 4)),
        (Layout("dimension", 1), (3, 4), (4, 3)),
        (Layout("sample_major"), (8, 3), (6, 3)),
        (Layout("shared", 1), (1, 3), (2, 3)),
    ],
    ids=str,
)
def test_every_sample_has_its_own_rows(state, layout, right, wrong):
    check_size(torch.zeros(right), layout, state, 4)
    with pytest.raises(ValueError, match=r"a\.b got an input of shape .* for a batch of 4 samples"):
        check_size(torch.zeros(wrong), layout, state, 4)


def test_which_uses_give_gradients_to_a_slot(state):
    x, weight = torch.zeros(4, 2, 3), torch.zeros(2, 3)
    assert not state.keeps_dense(x, weight)
    state.always_dense = True
    assert state.keeps_dense(x, weight, "weight")
    state.joined = frozenset({"weight"})
    assert not state.keeps_dense(x, weight, "weight")
    assert state.keeps_dense(x, weight, "another")
    state.private_step.is_compiled = True
    assert state.keeps_dense(x, weight, "weight")


def test_operands_are_those_of_autocast():
    x, weight = torch.ones(2, 3), torch.ones(2, 3)
    assert autocast_operands(x, weight, None) == (x, weight, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert [t.dtype for t in autocast_operands(x, weight)] == [torch.bfloat16] * 2
        assert autocast_operands(x, None)[1] is None
        assert product_dtype(x.double()) == torch.float64
        assert autocast_operands(x.double(), weight)[1] is weight
