"""Factors of samples with different numbers of tokens."""

import pytest
import torch

from dp_clipping.clipping.accumulation import Weights
from dp_clipping.layers.embedding.factors import EmbeddingFactors
from dp_clipping.layers.embedding.ragged import RaggedFactors

IDS = torch.tensor([1, 2, 1, 0, 3, 3, 3, 3])
SAMPLES = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3])  # sample 1 has none


@pytest.fixture
def factors():
    y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return RaggedFactors(IDS, SAMPLES, y, 4, 5)


def test_the_norm_is_of_the_sums_over_equal_tokens(factors):
    dense = factors.dense()
    torch.testing.assert_close(dense[0, 1], factors.y[0] + factors.y[2])
    torch.testing.assert_close(dense[3, 3], factors.y[4:].sum(0))
    assert not dense[1].any()
    torch.testing.assert_close(factors.norm().squared, dense.square().sum((1, 2)))


def test_the_weighted_sum(factors):
    c = torch.tensor([0.5, 9.0, 2.0, 0.0], dtype=torch.float64)
    found = factors.weighted_sum(Weights(c, c.tolist()))
    torch.testing.assert_close(found, torch.einsum("b,bvd->vd", c, factors.dense()))


def test_some_samples(factors):
    factors.y[:3] = torch.nan
    part = factors.only(torch.tensor([False, True, True, True])).dense()
    assert torch.equal(part[1:], factors.dense()[1:])
    assert not part[0].any()


def test_nothing():
    none = torch.zeros(0, dtype=torch.long)
    factors = RaggedFactors(none, none, torch.zeros(0, 4), 2, 5)
    assert factors.norm().squared.tolist() == [0, 0]
    assert factors.weighted_sum(Weights(torch.ones(2), [1.0, 1.0])).shape == (5, 4)


def test_samples_of_one_length_are_as_those_of_a_rectangle():
    torch.manual_seed(0)
    ids, y = torch.randint(4, (3, 5)), torch.randn(3, 5, 2, dtype=torch.float64)
    samples = torch.arange(3).repeat_interleave(5)
    ragged = RaggedFactors(ids.flatten(), samples, y.flatten(0, 1), 3, 4)
    whole = EmbeddingFactors(ids, y, 4)
    torch.testing.assert_close(ragged.norm().squared, whole.norm().squared)
    c = torch.rand(3, dtype=torch.float64)
    weights = Weights(c, c.tolist())
    torch.testing.assert_close(ragged.weighted_sum(weights), whole.weighted_sum(weights))
