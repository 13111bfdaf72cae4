"""Which dimension is the batch: what one sample or none tells of it is provisional."""

import pytest
import torch
from torch import nn

from dp_clipping.criterion import PrivateCriterion
from dp_clipping.sampling.usage import Ticket
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


class WithTable(nn.Module):
    """Attention to the rows of a table, an argument, which a layer with parameters reads."""

    def __init__(self):
        super().__init__()
        self.words, self.rows, self.last = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, ids, table):
        rows = self.rows(table.float()[:, :1].expand(-1, 4))
        return self.last((self.words(ids) @ rows.mT).softmax(-1) @ rows).mean(1)


class TableFirst(WithTable):
    def forward(self, table, ids):
        return super().forward(ids, table)


MASK = torch.ones(3, 3).tril().bool()
LABELS = torch.tensor([0, 1, 1, 0])


def sums_of(network, batches, is_yielded=False):
    """Returns the sums of private steps, of which the loader has yielded the batches or not."""
    model = private(zoo.seeded(network), max_grad_norm=1e6)
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(reduction="sum"), "sum")
    for size, *args in batches:
        model.zero_grad()
        if is_yielded:
            model.step_state.usage.hand_over(Ticket(samples=size))
        criterion(model(*args), LABELS[:size]).backward()
        yield {n: p.grad.clone() for n, p in model.network.named_parameters()}


def ordinary(network, size, *args):
    network = zoo.seeded(network)
    nn.CrossEntropyLoss(reduction="sum")(network(*args), LABELS[:size]).backward()
    return {n: p.grad for n, p in network.named_parameters()}


def test_an_argument_that_has_as_many_rows_as_the_batch_by_chance():
    """It has had them in a batch of another size, so they are not of samples."""
    batches = (4, torch.cat([IDS, IDS[:1]]), MASK), (3, IDS, MASK)
    *_, last = sums_of(WithMask, batches)
    assert_close(last, ordinary(WithMask, *batches[1]), 1e-5)


@pytest.mark.parametrize("network", [WithMask, WithTable, TableFirst])
def test_an_argument_that_has_more_rows_than_the_batch(network):
    """The loader has yielded as many samples as another one has rows."""
    batches = []
    for size in (0, 1, 2, 4, 2):
        ids = IDS.repeat(2, 1)[:size]
        args = (ids, MASK) if network is WithMask else (ids, torch.arange(5)[:, None])
        batches.append((size, *(args[::-1] if network is TableFirst else args)))
    for found, batch in zip(sums_of(network, batches, is_yielded=True), batches, strict=True):
        if batch[0]:
            assert_close(found, ordinary(network, *batch), 1e-5)
        else:
            assert not any(g.any() for g in found.values())


def test_rows_that_change_may_be_of_several_samples():
    """They are refused where a batch is compared with an earlier one."""
    batches = [(2, IDS[:2], torch.arange(5)[:, None] + n) for n in range(2)]
    steps = sums_of(WithTable, batches, is_yielded=True)
    next(steps)
    with pytest.raises(
        ValueError, match=r"shape \(5, 1\) in a batch of 2 samples, and other values"
    ):
        next(steps)
