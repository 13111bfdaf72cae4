"""Generators that are put back, and dropout that is off."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dp_clipping.capture.randomness import (
    deterministic_kernels,
    fork_randomness,
    generator_states,
    same_generators,
    without_dropout,
)

CPU = torch.device("cpu")


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)


def test_every_generator_is_put_back():
    module = Drawing()
    before = generator_states([module], CPU)
    with fork_randomness(CPU), same_generators([module]):
        for draw in (
            random.random,
            np.random.rand,
            lambda: torch.rand(1),
            lambda: torch.rand(1, generator=module.draw),
        ):
            now = generator_states([module], CPU)
            draw()
            assert generator_states([module], CPU) != now
    assert generator_states([module], CPU) == before


@pytest.mark.parametrize(
    "drop",
    [lambda x: F.dropout(x, 0.5), lambda x: torch.dropout(x, 0.5, True), nn.Dropout(0.5)],
    ids=["functional", "torch", "module"],
)
def test_dropout_is_off_inside_and_on_afterwards(drop):
    network, x = nn.Sequential(drop if isinstance(drop, nn.Module) else nn.ReLU()), torch.ones(64)
    with without_dropout(network):
        assert torch.equal(drop(x), x)
    assert (drop(x) == 0).any()


def test_attention_drops_nothing_inside():
    q = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with without_dropout(nn.ReLU()):
        for found in (
            F.scaled_dot_product_attention(q, q, q, None, 0.5, True),
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True),
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("before", [False, True])
def test_kernels_are_deterministic_inside_and_nothing_else_changes(before):
    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with deterministic_kernels():
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.utils.deterministic.fill_uninitialized_memory
                warnings.warn("kthvalue does not have a deterministic implementation", stacklevel=1)
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_rounds_alike_in_each_run():
    draw = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(3, 2, 4, 512, 64, device="cuda", generator=draw).bfloat16().requires_grad_()
    with deterministic_kernels():
        gradients = [
            torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=True).sum(), qkv)[0]
            for _ in range(5)
        ]
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
