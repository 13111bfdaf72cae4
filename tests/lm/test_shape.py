"""Counts of operations by which times are scaled."""

from dataclasses import replace

import pytest
import torch

from ddp_by_hand.lm.model import ModelConfig, Transformer, flops_per_token
from ddp_by_hand.lm.shape import CASTS, Computation, Shape

SHAPE = Shape(ModelConfig(num_layers=2, d_model=32, d_ff=64, context_length=16), 4, "float32")


def test_products_are_those_of_the_flop_count_and_grow_as_operations_do():
    """Forward's multiply-adds are a third of 6 N / 2 per token, norms and attention apart."""
    products = sum(counts[0] for counts in SHAPE.forward_counts())
    model = SHAPE.model
    attention = 12 * model.num_layers * model.context_length * model.d_model
    weights = (flops_per_token(model) - attention) / 6
    norms = 2 * model.d_model * model.num_layers
    assert products == SHAPE.tokens * (weights + norms)
    assert len(SHAPE.forward_counts()) == model.num_layers + 2
    twice = replace(SHAPE, model=replace(SHAPE.model, context_length=32))
    name = "blocks.0.attention.value.weight"
    *once, _ = SHAPE.backward_counts(name)
    assert [b / a for a, b in zip(once, twice.backward_counts(name), strict=False)] == [2, 4, 2, 1]
    table = "token_embedding.weight"
    assert SHAPE.backward_counts(table) == twice.backward_counts(table)
    assert replace(SHAPE, dtype="bfloat16").gradient_bytes * 2 == SHAPE.gradient_bytes


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_autocast_casts_what_is_multiplied(tie_embeddings):
    """Every weight of a linear layer forward, and its gradient backward; no norm and no look-up."""
    model = replace(SHAPE.model, tie_embeddings=tie_embeddings)
    mixed = Shape(model, 4, "mixed")
    linear = [m.weight for m in Transformer(model).modules() if isinstance(m, torch.nn.Linear)]
    moved = CASTS * sum(weight.numel() for weight in linear)
    assert sum(counts[4] for counts in mixed.forward_counts()) == moved
    assert sum(mixed.backward_counts(name)[4] for name in mixed.gradients) == moved
    for dtype in ("float32", "bfloat16"):
        assert not any(c[4] for c in Shape(model, 4, dtype).forward_counts())


def measured(shape: Shape) -> Computation:
    *linear, _look_up = shape.gradients
    work = [*[(3e-3, 0.0, 2e-3, 1e-3)] * len(linear), (0.0, 0.0, 5e-3, 1e-3)]
    return Computation(shape, (5e-3, 1e-3, 4e-3, 1e-3), work, optimizer=1e-3, rest=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_computation_scaled_to_its_own_shape_is_what_was_measured(dtype):
    shape = replace(SHAPE, dtype=dtype)
    times = measured(shape).scaled(shape)
    assert sum(times.forward) == pytest.approx(11e-3)
    assert times.backward == pytest.approx([6e-3] * len(shape.gradients))
    assert (times.optimizer, times.rest) == pytest.approx((1e-3, 1e-4))
    assert times.copy * shape.gradient_bytes == pytest.approx(2 / 7 * 1e-3)
    assert times.times(2.0).backward == pytest.approx([12e-3] * len(shape.gradients))


def test_casts_do_not_grow_with_the_batch():
    """Twice the tokens are twice the products and other work, but the same weights."""
    mixed = replace(SHAPE, dtype="mixed")
    computation = measured(mixed)
    per_byte = 1e-3 / 7 / mixed.gradient_bytes
    casts = per_byte * sum(counts[4] for counts in mixed.forward_counts())
    assert casts > 1e-5
    twice = sum(computation.scaled(replace(mixed, batch_size=8)).forward)
    assert twice == pytest.approx(2 * (10e-3 - casts) + casts + 1e-3)
