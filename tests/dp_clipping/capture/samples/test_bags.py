"""Batches whose ids lie one after another, with other samples of them."""

import pytest
import torch

from dp_clipping.capture.samples.bags import Bags, place_of
from dp_clipping.capture.samples.batch import Batch

IDS = torch.arange(10, 16)
OFFSETS = torch.tensor([0, 2, 2, 5])  # bags of 2, 0, 3 and 1
WEIGHTS = torch.arange(6.0)


def batch(last: bool = False) -> Batch:
    offsets = torch.cat((OFFSETS, torch.tensor([6]))) if last else OFFSETS
    args = IDS, offsets, {"weights": WEIGHTS, "other": torch.arange(4)[:, None]}
    return Batch(args, {}, True, (Bags(0, 1, 2, last),))


@pytest.mark.parametrize("last", [False, True])
def test_batches_of_other_samples(last):
    assert batch(last).size == 4
    (ids, offsets, rest), _ = batch(last).with_rows([2, 1, 0, 2])
    assert ids.tolist() == [12, 13, 14, 10, 11, 12, 13, 14]
    assert offsets.tolist() == [0, 3, 3, 5, 8][: 4 + last]
    assert rest["weights"].tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert rest["other"].flatten().tolist() == [2, 1, 0, 2]
    ids, offsets, _ = batch(last).first(1).args
    assert (ids.tolist(), offsets.tolist()) == ([10, 11], [0, 2][: 1 + last])
    (ids, offsets, _), _ = batch(last).with_rows([1])
    assert (ids.tolist(), offsets.tolist()) == ([], [0, 0][: 1 + last])
    (ids, offsets, _), _ = Batch(*batch(last).with_rows([]), True, batch(last).bags).with_rows([])
    assert (ids.tolist(), offsets.tolist()) == ([], [0][:last])


def test_one_sample_is_larger():
    found = batch().with_factor(2, 10.0)
    assert batch().has_floats
    assert found.args[2]["weights"].tolist() == [0, 1, 20, 30, 40, 5]


@pytest.mark.parametrize("last", [False, True])
def test_a_row_that_stands_for_no_sample(last):
    (ids, offsets, _), _ = Batch(
        *batch(last).with_rows([]), True, batch(last).bags
    ).with_a_row_of_zeros()
    assert (ids.tolist(), offsets.tolist()) == ([0], [0, 1][: 1 + last])


def test_samples_that_differ():
    ids, offsets = torch.tensor([1, 2, 1, 2, 1, 2, 3]), torch.tensor([0, 2, 4])
    assert Batch((ids, offsets), {}, True, (Bags(0, 1),)).distinct(3) == [0, 2]


def test_rows_of_something_else_beside_bags_are_refused():
    for other in (torch.ones(2, 3), torch.ones(6)):
        with pytest.raises(ValueError, match="other rows than one for each sample"):
            Batch((IDS, OFFSETS, other), {}, True, (Bags(0, 1),))
    Batch((IDS, OFFSETS, torch.ones(1, 3), torch.ones(7)), {}, True, (Bags(0, 1),))


def test_an_argument_is_told_by_being_it_or_by_its_values():
    leaves = [IDS, OFFSETS, "text", IDS.float()]
    assert place_of(OFFSETS, leaves) == 1
    assert place_of(IDS.view(-1), leaves) == 0
    assert place_of(OFFSETS.int(), leaves) == 1
    assert place_of(OFFSETS + 1, leaves) is None
    assert place_of(IDS.clone(), leaves) is None  # two have these values
