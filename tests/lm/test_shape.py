"""Counts of operations by which times are scaled."""

from dataclasses import replace

import torch

from lm.model import ModelConfig, Transformer, flops_per_token, forward_loss
from lm.shape import Shape

SHAPE = Shape(ModelConfig(num_layers=2, d_model=32, d_ff=64, context_length=16), 4, "float32")


def test_gradients_stand_in_the_order_of_backward():
    network, order = Transformer(SHAPE.model), []
    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    forward_loss(network, (tokens, tokens)).backward()
    assert list(SHAPE.gradients) == order
    assert SHAPE.gradients == {name: p.numel() for name, p in network.named_parameters()}


def test_products_are_those_of_the_flop_count():
    """Forward's multiply-adds are a third of 6 N / 2 per token, norms and attention apart."""
    products = sum(counts[0] for counts in SHAPE.forward_counts())
    model = SHAPE.model
    attention = 12 * model.num_layers * model.context_length * model.d_model
    weights = (flops_per_token(model) - attention) / 6
    norms = 2 * model.d_model * model.num_layers
    assert products == SHAPE.tokens * (weights + norms)
    assert len(SHAPE.forward_counts()) == model.num_layers + 2


def test_counts_grow_as_operations_do():
    twice = replace(SHAPE, model=replace(SHAPE.model, context_length=32))
    name = "blocks.0.attention.value.weight"
    ratios = [
        b / a for a, b in zip(SHAPE.backward_counts(name), twice.backward_counts(name), strict=True)
    ]
    assert ratios == [2, 4, 2, 1]
    table = "token_embedding.weight"
    assert SHAPE.backward_counts(table) == twice.backward_counts(table)
    assert replace(SHAPE, dtype="bfloat16").gradient_bytes * 2 == SHAPE.gradient_bytes
