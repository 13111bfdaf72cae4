"""Factors of an embedding: tokens that repeat within a sample add up before the norm is taken."""

import pytest
import torch

from dp_clipping.clipping.accumulation import Weights
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.embedding.factors import (
    EmbeddingFactors,
    batch_tokens,
    look_up,
    without_padding,
)

IDS = torch.tensor([[1, 2, 1], [0, 0, 0], [3, 1, 2]])


@pytest.fixture
def factors():
    y = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return EmbeddingFactors(IDS, y, 5)


def test_the_norm_is_of_the_sums_over_equal_tokens(factors):
    dense = factors.dense()
    assert dense.shape == (3, 5, 4)
    torch.testing.assert_close(dense[0, 1], factors.y[0, 0] + factors.y[0, 2])
    torch.testing.assert_close(factors.norm().squared, dense.square().sum((1, 2)))
    apart = factors.y.square().sum((1, 2))
    assert not torch.isclose(factors.norm().squared[:2], apart[:2]).any()


def test_the_weighted_sum(factors):
    c = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    found = factors.weighted_sum(Weights(c, c.tolist()))
    torch.testing.assert_close(found, torch.einsum("b,bvd->vd", c, factors.dense()))


def test_some_samples(factors):
    factors.y[0] = torch.nan
    part = factors.only(torch.tensor([False, True, True])).dense()
    assert torch.equal(part[1:], factors.dense()[1:])
    assert not part[0].any()


def test_padding_trains_nothing():
    y = torch.ones(3, 3, 2)
    found = without_padding(IDS, y, 2)
    assert found[..., 0].tolist() == [[1, 0, 1], [1, 1, 1], [1, 1, 0]]
    assert without_padding(IDS, y, None) is y


def test_tokens_of_time_major_inputs():
    ids, gy = batch_tokens(IDS.t(), torch.arange(9.0).view(3, 3, 1), Layout("dimension", 1), 3)
    assert torch.equal(ids, IDS)
    assert gy[0, :, 0].tolist() == [0, 3, 6]


@pytest.mark.parametrize("shape", [(7,), (2, 3)])
def test_shared_ids_are_looked_up_once(shape, monkeypatch):
    seen, embedding = [], torch.nn.functional.embedding
    monkeypatch.setattr(
        torch.nn.functional,
        "embedding",
        lambda ids, w: seen.append(ids.numel()) or embedding(ids, w),
    )
    weight, one = torch.randn(9, 4), torch.randint(9, shape)
    ids = one.expand(5, *shape)
    found = look_up(ids, weight)
    assert seen == [one.numel()]
    assert torch.equal(found, weight[ids])
    assert found.is_contiguous()
    look_up(ids.clone(), weight)
    assert seen[1] == 5 * one.numel()
