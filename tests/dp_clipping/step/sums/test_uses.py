"""What several uses of a parameter leave, joined: G is their sum, whatever each of them leaves."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.layers.embedding.module import EmbeddingFactors
from dp_clipping.layers.handle import Site
from dp_clipping.layers.projection import Linear
from dp_clipping.layers.recorder import DENSE, FACTORS, LINEAR, Joint, Trainable
from dp_clipping.step.sums.backward_state import Kept
from dp_clipping.step.sums.plain import Uses
from tests.dp_clipping.step.sums.test_memory import Live

B, T, D, P = 3, 2, 8, 9


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
    uses.add(LINEAR, (weight,), Site(Linear, weight), (y, a))
    return y.mT @ a


def look_up(uses: Uses, weight: Trainable) -> Tensor:
    """Adds a use of an embedding, and returns its G."""
    factors = EmbeddingFactors(torch.randint(D, (B, T)), torch.randn(B, T, P), D)
    uses.add(FACTORS, (weight,), factors, factors.held(factors))
    return factors.dense()


def test_one_use_is_not_copied(weight):
    uses, (y, a) = Uses(B, Kept()), operands()
    add(uses, weight, y, a)
    look_up(uses, weight)
    ((_, _, factors, _),) = uses.joined(weight.joint)
    assert factors.operands[0] is y


def test_beside_compiled_code_gradients_are_added(weight):
    """It leaves G, which may be somebody else's too: nothing is added to it in place."""
    uses, given = Uses(B, Kept()), torch.randn(B, D, P)
    before = given.clone()
    expected = before + add(uses, weight, *operands())
    uses.add(DENSE, (weight,), None, (given,))
    expected = expected + before
    uses.add(DENSE, (weight,), None, (given,))
    ((kind, _, _, (gradients,)),) = uses.joined(weight.joint)
    assert kind is DENSE
    torch.testing.assert_close(gradients, expected)
    assert torch.equal(given, before)


def test_gradients_of_further_uses_are_added_in_place(weight):
    """So that one sum takes memory beside what is given."""
    uses, given = Uses(B, Kept()), [torch.randn(B, D, P) for _ in range(4)]
    with Live() as live:
        for gradients in given:
            uses.add(DENSE, (weight,), None, (gradients,))
    assert live.peak == 5 * given[0].nbytes
    ((_, _, _, (total,)),) = uses.joined(weight.joint)
    torch.testing.assert_close(total, sum(given))
