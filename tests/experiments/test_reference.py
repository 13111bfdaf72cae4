"""The reference itself: beside gradients of batches, finite differences and numbers by hand."""

import ast
import math
from pathlib import Path

import pytest
import torch

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.support import zoo

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

BATCH_SIZE = zoo.SIZE
# The loss depends on a padding embedding, whose gradient is zero by definition.
WITHOUT_DERIVATIVE = ("padding_idx", "padding_idx_tied")
WITH_DERIVATIVE = [case.name for case in zoo.CASES if case.name not in WITHOUT_DERIVATIVE]


def losses_of(case, model, batch):
    return case.per_sample_loss(oracle.forward(model, batch[0]), batch[1])


def gradients_of(case, batch_size=BATCH_SIZE):
    return oracle.per_sample_gradients(case.build(), case.batch(batch_size), case.per_sample_loss)


def in_float64(case, batch_size=BATCH_SIZE):
    batch = oracle.move(case.batch(batch_size), dtype=torch.float64)
    return case.build().double(), batch


def test_it_has_nothing_of_what_it_judges():
    """Only PyTorch, its private interfaces and the standard library."""
    nodes = list(ast.walk(ast.parse(Path(oracle.__file__).read_text())))
    plain = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    plain += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    own = {name for name in plain if name.startswith("dp_clipping")}
    assert own == {"dp_clipping.torch_compat"}
    assert {name.partition(".")[0] for name in set(plain) - own} == {
        "collections", "copy", "itertools", "torch", "typing",
    }  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, BATCH_SIZE])
@pytest.mark.parametrize("case", zoo.parameters(*WITHOUT_DERIVATIVE))
def test_they_add_up_to_the_gradient_of_the_batch(case, batch_size):
    """Compares the sum of networks that the derivatives below leave out."""
    model, batch = in_float64(case, batch_size)
    with oracle.Widened(torch.float64):
        losses_of(case, model, batch).sum().backward()
    gradients = gradients_of(case, batch_size)
    assert list(gradients) == [name for name, p in model.named_parameters() if p.requires_grad]
    for name, g in gradients.items():
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(g.sum(0), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", zoo.parameters(*WITH_DERIVATIVE))
def test_beside_a_derivative_by_differences(case):
    """Along a random direction v, ⟨g_i, v⟩: fails if something inside is rounded to float32."""
    model, batch = in_float64(case)
    gradients = gradients_of(case)
    draw = torch.Generator().manual_seed(5)
    direction = {
        name: torch.randn(g.shape[1:], generator=draw, dtype=g.dtype)
        for name, g in gradients.items()
    }
    parameters = dict(model.named_parameters())

    @torch.no_grad()
    def shifted(step):
        for name, v in direction.items():
            parameters[name] += step * v
        with oracle.Widened(torch.float64):
            result = losses_of(case, model, batch)
        for name, v in direction.items():
            parameters[name] -= step * v
        return result

    h = 1e-5
    actual = (8 * (shifted(h) - shifted(-h)) - (shifted(2 * h) - shifted(-2 * h))) / (12 * h)
    expected = sum(oracle.per_sample_sum(g * direction[name]) for name, g in gradients.items())
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", zoo.parameters("mlp", "transformer_tied", "scalar", "embedding"))
def test_a_batch_of_none(case):
    batch = oracle.pick(case.batch(2), slice(0, 0))
    model = case.build()
    gradients = oracle.per_sample_gradients(model, batch, case.per_sample_loss)
    assert oracle.norms(gradients).shape == (0,)
    for name, total in oracle.clipped_sum(gradients, 1.0).items():
        assert torch.equal(total, torch.zeros_like(total)), name
        assert total.shape == dict(model.named_parameters())[name].shape


@pytest.mark.parametrize("case", zoo.parameters("half_frozen", "transformer_tied", "unused"))
def test_names_and_what_is_left_alone(case):
    model = case.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = oracle.per_sample_gradients(model, case.batch(3), case.per_sample_loss)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert list(gradients) == list(trainable)
    for name, g in gradients.items():
        assert g.shape == (3, *trainable[name].shape)
        assert g.dtype == torch.float64
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def by_hand():
    """Norms 5, 0 and 13: (3, 4, 0), zero, and (0, 5, 12), of modules a and b."""
    return {
        "a.weight": torch.tensor([[3.0], [0.0], [0.0]]).double(),
        "b.weight": torch.tensor([[[4.0]], [[0.0]], [[5.0]]]).double(),
        "b.bias": torch.tensor([0.0, 0.0, 12.0]).double(),
    }


def same_numbers(actual, *expected):
    assert [g.flatten().tolist() for g in actual.values()] == [pytest.approx(e) for e in expected]


def test_clipped_sums_by_hand():
    g = by_hand()
    assert oracle.norms(g).tolist() == [5, 0, 13]
    same_numbers(oracle.clipped_sum(g, 100.0), [3], [9], [12])
    same_numbers(oracle.clipped_sum(g, 6.5), [3], [4 + 2.5], [6])
    same_numbers(oracle.clipped_sum(g, 1.0), [3 / 5], [4 / 5 + 5 / 13], [12 / 13])
    automatic = oracle.clipped_sum(g, 1.0, clipping_function="automatic", gamma=1.0)
    same_numbers(automatic, [3 / 6], [4 / 6 + 5 / 14], [12 / 14])
    c = oracle.coefficients(g, 1.0)
    assert all(values.tolist() == pytest.approx([1 / 5, 1, 1 / 13]) for values in c.values())
    g, root = by_hand(), math.sqrt(2)
    assert oracle.module_groups(list(g)) == [["a.weight"], ["b.weight", "b.bias"]]
    per_layer = oracle.clipped_sum(g, 2 * root, "per_layer")  # C / √2 = 2
    same_numbers(per_layer, [2], [2 + 2 * 5 / 13], [2 * 12 / 13])
    given = oracle.clipped_sum(g, [1.0, 8.0], "per_layer")
    same_numbers(given, [1], [4 + 8 * 5 / 13], [8 * 12 / 13])
    one_each = oracle.clipped_sum(g, math.sqrt(3), "per_layer", groups=[[name] for name in g])
    same_numbers(one_each, [1], [2], [1])
    automatic = oracle.clipped_sum(g, root, "per_layer", "automatic", gamma=1.0)
    same_numbers(automatic, [3 / 4], [4 / 5 + 5 / 14], [12 / 14])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("function", ["abadi", "automatic"])
def test_a_sample_that_is_not_finite_contributes_nothing(value, clipping, function):
    g, without = by_hand(), by_hand()
    g["a.weight"][2] = value
    for gradient in without.values():
        gradient[2] = 0
    assert oracle.norms(g).isfinite().tolist() == [True, True, False]
    actual = oracle.clipped_sum(g, 1.0, clipping, function)
    torch.testing.assert_close(actual, oracle.clipped_sum(without, 1.0, clipping, function))
