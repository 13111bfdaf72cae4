"""Embeddings: tokens that repeat within a sample add up before the norm is taken."""

import pytest
import torch
from torch import nn

from dp_clipping.clipping.accumulation import Weights
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.embedding import EmbeddingFactors, batch_tokens, without_padding
from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import MODES, assert_close, clipped_sums, private, unchecked
from tests.support import zoo

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


class Bags(nn.Module):
    """Bags of ids [B, T], or [B, bags, T], with weights that depend on a parameter, or none."""

    def __init__(self, mode: str, padding: bool = False, weights: bool = False, many: bool = False):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=2 if padding else None)
        self.of_weights = nn.Embedding(9, 1) if weights else None
        self.many, self.is_reused = many, False

    def forward(self, ids):
        y = self.bags_of(ids)
        return y * self.bags_of(ids.flip(1)).sin() if self.is_reused else y

    def bags_of(self, ids):
        rows = ids.view(-1, 3) if self.many else ids
        given = {}
        if self.of_weights is not None:
            given["per_sample_weights"] = torch.tanh(self.of_weights(rows)).squeeze(2)
        return self.bag(rows, **given).view(len(ids), -1)


BAGS = {
    "sum": lambda: Bags("sum"),
    "mean": lambda: Bags("mean"),
    "mean, padded": lambda: Bags("mean", padding=True),
    "weights": lambda: Bags("sum", padding=True, weights=True),
    "several": lambda: Bags("mean", padding=True, many=True),
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reused", [False, True])
def test_bags(name, mode, reused):
    torch.manual_seed(0)
    network = BAGS[name]().double()
    network.is_reused = reused
    ids = torch.randint(9, (4, 6))
    ids[0] = 2  # a bag of padding alone
    batch = ids, torch.randn_like(network(ids))
    gradients = oracle.per_sample_gradients(network, batch, zoo.product)
    norms = oracle.norms(gradients)
    threshold = norms.median().item()
    model = private(network, mode, max_grad_norm=threshold)
    assert "embedding_bag" in {handle.kind for handle in model.capture.handles}
    sums, expected = clipped_sums(model, batch), oracle.clipped_sum(gradients, threshold)
    torch.testing.assert_close(model.per_sample_gradient_norms, norms)
    assert_close(sums, expected, 1e-9)


class Words(nn.Module):
    """An embedding of ids, whose weight may be the head's too."""

    def __init__(self, tied: bool):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids).sin())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [lambda: Words(False), lambda: Words(True), lambda: Bags("mean")])
def test_ids_in_int32(build, mode):
    """PyTorch's embeddings take them too."""
    torch.manual_seed(0)
    network = build().double()
    ids = torch.randint(9, (4, 6), dtype=torch.int32)
    batch = ids, torch.randn_like(network(ids))
    gradients = oracle.per_sample_gradients(network, batch, zoo.product)
    threshold = oracle.norms(gradients).median().item()
    model = private(network, mode, max_grad_norm=threshold)
    sums, expected = clipped_sums(model, batch), oracle.clipped_sum(gradients, threshold)
    assert_close(sums, expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sample_of_bags_contributes_at_most_c(dtype):
    network, ids = Bags("mean", padding=True).to(dtype), torch.randint(9, (1, 6))
    model = unchecked(network, "bookkeeping", max_grad_norm=0.1)
    sums = clipped_sums(model, (ids, torch.randn(1, 4).to(dtype)))
    assert 0.99 < sums["bag.weight"].double().norm() / 0.1 <= 1 + 1e-6


def check_bags_on_kernels() -> None:
    for mode in ("flash", "flash_bookkeeping"):
        torch.manual_seed(0)
        network, ids = Bags("sum", padding=True), torch.randint(9, (4, 6))
        batch = ids, torch.randn(4, 4)
        gradients = oracle.per_sample_gradients(network, batch, zoo.product)
        threshold = oracle.norms(gradients).median().item()
        sums = clipped_sums(unchecked(network, mode, max_grad_norm=threshold), batch)
        assert_close(sums, oracle.clipped_sum(gradients, threshold), 2e-4)


def test_bags_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_bags_on_kernels)
