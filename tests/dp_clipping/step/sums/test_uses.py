"""What several uses of a parameter leave, joined: G is their sum, whatever each of them leaves."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.kept import Kept
from dp_clipping.layers.handle import Site
from dp_clipping.layers.projection import Linear
from dp_clipping.layers.recorder import DENSE, LINEAR, Joint, Trainable
from dp_clipping.step.sums.uses import Uses

B, T, D, P = 3, 2, 4, 5


@pytest.fixture
def weight() -> Trainable:
    """The record of a linear layer's weight, which has several uses."""
    shape = torch.Size((D, P))
    parameter = nn.Parameter(torch.zeros(shape))
    found = Trainable(parameter, 0, "weight", shape, 0, 0, torch.float32, torch.zeros(()))
    found.joint = Joint((found,), frozenset({found}), frozenset({found}))
    return found


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, D), torch.randn(B, T, P)


def add(uses: Uses, weight: Trainable, y: Tensor, a: Tensor) -> Tensor:
    """Adds a use of a linear layer, and returns its G."""
    uses.add(LINEAR, (weight,), (y, a, Site(Linear, weight)), (y, a))
    return y.mT @ a


def test_uses_of_a_linear_layer_are_more_tokens(weight):
    uses = Uses(B, Kept())
    expected = sum(add(uses, weight, *operands()) for _ in range(3))
    ((kind, records, (y, a, _), _),) = uses.joined(weight.joint)
    assert (kind, records) == (LINEAR, (weight,))
    torch.testing.assert_close(y.mT @ a, expected)
    assert not list(uses.joined(weight.joint))


def test_beside_compiled_code_gradients_are_added(weight):
    """It leaves G, which may be somebody else's too: nothing is added to it in place."""
    uses, given = Uses(B, Kept()), torch.randn(B, D, P)
    before = given.clone()
    expected = before + add(uses, weight, *operands())
    uses.add(DENSE, (weight,), (given, None), (given,))
    expected = expected + before
    uses.add(DENSE, (weight,), (given, None), (given,))
    ((kind, _, (gradients, _), _),) = uses.joined(weight.joint)
    assert kind is DENSE
    torch.testing.assert_close(gradients, expected)
    assert torch.equal(given, before)


def test_what_changes_while_it_waits_is_refused(weight):
    uses = Uses(B, Kept())
    y, a = operands()
    add(uses, weight, y, a)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="weight: the gradient of its layer's output"):
        list(uses.joined(weight.joint))
