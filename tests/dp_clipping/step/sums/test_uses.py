"""What several uses of a parameter leave, joined: G is their sum, whatever each of them leaves."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.kept import Kept
from dp_clipping.clipping.accumulation import Weights
from dp_clipping.layers.embedding.factors import EmbeddingFactors, TiedFactors
from dp_clipping.layers.handle import Site
from dp_clipping.layers.projection import Linear
from dp_clipping.layers.recorder import DENSE, FACTORS, LINEAR, Joint, Trainable
from dp_clipping.step.sums.uses import Uses
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
    uses.add(LINEAR, (weight,), (y, a, Site(Linear, weight)), (y, a))
    return y.mT @ a


def test_uses_of_a_linear_layer_are_more_tokens(weight):
    uses = Uses(B, Kept())
    expected = sum(add(uses, weight, *operands()) for _ in range(3))
    ((kind, records, (y, a, _), _),) = uses.joined(weight.joint)
    assert (kind, records) == (LINEAR, (weight,))
    torch.testing.assert_close(y.mT @ a, expected)
    assert not list(uses.joined(weight.joint))


def look_up(uses: Uses, weight: Trainable) -> Tensor:
    """Adds a use of an embedding, and returns its G."""
    factors = EmbeddingFactors(torch.randint(D, (B, T)), torch.randn(B, T, P), D)
    uses.add(FACTORS, (weight,), factors, factors.held(factors))
    return factors.dense()


def norms_of(gradients: Tensor) -> Tensor:
    return gradients.square().sum((1, 2))


@pytest.mark.parametrize("products", [0, 1, 2])
@pytest.mark.parametrize("look_ups", [1, 2])
def test_look_ups_are_more_tokens_beside_products(weight, products, look_ups):
    uses = Uses(B, Kept())
    expected = sum(add(uses, weight, *operands()) for _ in range(products))
    expected = expected + sum(look_up(uses, weight) for _ in range(look_ups))
    ((kind, records, factors, tensors),) = uses.joined(weight.joint)
    assert (kind, records) == (FACTORS, (weight,))
    assert type(factors) is (TiedFactors if products else EmbeddingFactors)
    assert tensors == factors.held(factors)
    torch.testing.assert_close(factors.norm().squared, norms_of(expected))
    total = factors.weighted_sum(Weights(torch.ones(B)))
    torch.testing.assert_close(total, expected.sum(0))
    assert not list(uses.joined(weight.joint))


@pytest.mark.parametrize("look_ups", [1, 2])
def test_of_many_products_gradients_are_smaller(weight, look_ups):
    """So they are formed, and look-ups are added to them."""
    uses = Uses(B, Kept())
    expected = sum(add(uses, weight, *operands()) for _ in range(D))
    expected = expected + sum(look_up(uses, weight) for _ in range(look_ups))
    ((kind, _, (gradients, _), _),) = uses.joined(weight.joint)
    assert kind is DENSE
    torch.testing.assert_close(gradients, expected)


def test_one_use_is_not_copied(weight):
    uses, (y, a) = Uses(B, Kept()), operands()
    add(uses, weight, y, a)
    look_up(uses, weight)
    ((_, _, factors, _),) = uses.joined(weight.joint)
    assert factors.operands[0] is y


def test_bags_beside_products_leave_gradients(weight):
    """Adds bags whose samples have different numbers of tokens."""
    uses = Uses(B, Kept())
    expected = add(uses, weight, *operands()) + look_up(uses, weight)
    samples = torch.tensor([0, 0, 2])
    bags = EmbeddingFactors(torch.randint(D, (3,)), torch.randn(3, P), D, samples, B)
    uses.add(FACTORS, (weight,), bags, bags.held(bags))
    ((kind, _, (gradients, _), _),) = uses.joined(weight.joint)
    assert kind is DENSE
    torch.testing.assert_close(gradients, expected + bags.dense())


def test_products_that_no_plan_is_about_leave_gradients(weight):
    """Leaves out the embedding that shares their weight, as a step may."""
    weight.joint = Joint((weight,), frozenset(), frozenset({weight}))
    uses = Uses(B, Kept())
    expected = add(uses, weight, *operands())
    ((kind, _, (gradients, _), _),) = uses.joined(weight.joint)
    assert kind is DENSE
    torch.testing.assert_close(gradients, expected)


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


def test_gradients_of_further_uses_are_added_in_place(weight):
    """So that one sum takes memory beside what is given."""
    uses, given = Uses(B, Kept()), [torch.randn(B, D, P) for _ in range(4)]
    with Live() as live:
        for gradients in given:
            uses.add(DENSE, (weight,), (gradients, None), (gradients,))
    assert live.peak == 5 * given[0].nbytes
    ((_, _, (total, _), _),) = uses.joined(weight.joint)
    torch.testing.assert_close(total, sum(given))


def test_what_changes_while_it_waits_is_refused(weight):
    uses = Uses(B, Kept())
    y, a = operands()
    add(uses, weight, y, a)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="weight: the gradient of its layer's output"):
        list(uses.joined(weight.joint))
