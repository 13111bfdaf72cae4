"""Which dimension is the batch: what one sample or none tells of it is provisional."""

import pytest
import torch
from torch import nn

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import assert_close, private
from tests.support import zoo


class WithPositions(nn.Module):
    """Position ids [1, T], to be broadcast, beside ids [B, T]."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, ids, positions):
        return self.last(self.words(ids) + self.places(positions)).mean(1)


IDS, POSITIONS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 1, 1]]), torch.arange(3)[None]


def positioned(ids, first=None, again=False):
    model = private(zoo.seeded(WithPositions), max_grad_norm=1e6)
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(reduction="sum"), "sum")
    if first is not None:
        if again:
            model(IDS, POSITIONS)
            model.reset_batch_layouts()
        model(first, POSITIONS)
    criterion(model(ids, POSITIONS), torch.zeros(len(ids)).long()).backward()
    return {n: p.grad.clone() for n, p in model.network.named_parameters()}, model


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("rows", [0, 1])
def test_what_one_sample_tells_of_the_layout_is_provisional(rows, again):
    expected, _ = positioned(IDS)
    gradients, model = positioned(IDS, first=IDS[:rows], again=again)
    assert_close(gradients, expected, 1e-6)
    assert len(model.per_sample_gradient_norms) == 3
    positioned(IDS[:1], first=IDS)


def test_an_empty_batch_is_seen_beside_inputs_to_broadcast():
    gradients, model = positioned(IDS[:0])
    assert len(model.per_sample_gradient_norms) == 0
    assert not any(g.any() for g in gradients.values())


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_an_empty_batch_with_the_batch_in_dimension_1(tokens):
    model = private(nn.Sequential(nn.Linear(4, 3)), batch_first=False)
    assert model(torch.randn(tokens, 4, 4)).shape == (tokens, 4, 3)
    assert model(torch.randn(tokens, 0, 4)).shape == (tokens, 0, 3)


class WithMask(nn.Module):
    """Attention in which a mask [T, T], an argument, says which token sees which."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, ids, mask):
        x = self.words(ids)
        return self.last(torch.where(mask, x @ x.mT, -9.0).softmax(-1) @ x).mean(1)


def test_an_argument_that_has_as_many_rows_as_the_batch_by_chance():
    """It has had them in a batch of another size, so they are not of samples."""
    model = private(zoo.seeded(WithMask), max_grad_norm=1e6)
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(reduction="sum"), "sum")
    mask = torch.ones(3, 3).tril().bool()
    labels, sums = torch.tensor([0, 1, 1, 0]), []
    for ids in (torch.cat([IDS, IDS[:1]]), IDS):
        model.zero_grad()
        criterion(model(ids, mask), labels[: len(ids)]).backward()
        sums.append({n: p.grad.clone() for n, p in model.network.named_parameters()})
    network = zoo.seeded(WithMask)
    nn.CrossEntropyLoss(reduction="sum")(network(IDS, mask), labels[:3]).backward()
    assert_close(sums[1], {n: p.grad for n, p in network.named_parameters()}, 1e-5)
