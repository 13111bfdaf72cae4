"""Which classes may be registered, and which combinations are refused."""

import pytest
from torch import nn

from dp_clipping import register_layer
from dp_clipping.layers.registered.registry import arithmetic_of, is_registered, refuse_where_unfit
from tests.dp_clipping.conftest import private
from tests.support.registered_layers import Dense, Gate, dense_gradients, gate_gradients


def kinds(network: nn.Module) -> list[str]:
    return [handle.kind for handle in private(network).capture.handles]


def test_a_class_keeps_its_function():
    assert arithmetic_of(Gate(2, 3)).gradients is gate_gradients
    assert arithmetic_of(Dense(2, 3)).gradients is dense_gradients
    register_layer(Gate, gate_gradients)  # again, as a notebook's cell does


class Other(Gate):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_is_not_registered_with_its_base():
    assert is_registered(Gate(2, 2))
    assert not is_registered(Other(2, 2))
    assert kinds(nn.Sequential(Gate(2, 2), Other(2, 2))) == ["registered", "vectorized"]


def test_a_layer_with_another_forward_of_its_own_is_vectorized():
    layer = Gate(2, 2)
    layer.forward = lambda x: x * layer.scale
    assert kinds(layer) == ["vectorized"]


def test_a_parametrized_layer_is_vectorized():
    layer = Gate(2, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert kinds(layer) == ["vectorized"]


def test_what_ranks_share_is_refused():
    refuse_where_unfit("gate", Gate(2, 2), None)
    with pytest.raises(ValueError, match=r"gate \(Gate\).*do not register the class"):
        refuse_where_unfit("gate", Gate(2, 2), object())
