"""Which samples another run has in place of those of the first."""

import pytest
import torch

from dp_clipping.trials.perturb import enlarged, halves, one_more, one_source, replaced, thirds
from tests.support import host_cost


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 100])
def test_the_first_halves_part_each_two_samples(size):
    patterns = [one.stays for one in halves(size, 0)]
    for i in range(size):
        assert any(stays[i] for stays in patterns)
        assert not all(stays[i] for stays in patterns)
        for j in range(i):
            assert any(stays[i] and not stays[j] for stays in patterns)
            assert any(stays[j] and not stays[i] for stays in patterns)
    assert size == 1 or all(stays.any() and not stays.all() for stays in patterns)
    assert len(patterns) <= 11


@pytest.mark.parametrize("number", range(1, 6))
def test_later_halves_are_two_that_together_are_all(number):
    one, other = halves(8, number)
    assert (one.stays != other.stays).all()


def test_a_half_of_many_samples_costs_no_python_call_for_each():
    size = 1 << 16
    assert all(int(one.stays.sum()) == size // 2 for one in halves(size, 3))
    assert host_cost.calls_of(lambda: halves(size, 3))[0] < 50


def test_company_is_of_those_that_stay():
    stays = torch.tensor([True, False, True, False])
    assert one_source(stays, 2).rows.tolist() == [0, 2, 2, 2]
    assert [one.rows.tolist() for one in halves(4, 2)] == [[0, 2, 2, 2], [1, 1, 1, 3]]
    for number in range(12):
        for rows, stays, *_ in halves(8, number):
            assert set(rows.tolist()) <= {i for i in range(8) if stays[i]}
            assert [i for i in range(8) if stays[i]] == [i for i in range(8) if rows[i] == i]


@pytest.mark.parametrize(
    ("rows", "distinct"),
    [
        (range(3), [0, 1, 2]), (range(7), [0, 3, 6]), (range(7), [0, 2]), (range(5), [0]),
        ([0, 1], [0, 1]), ([0, 0], [0]),
    ],
)  # fmt: skip
def test_each_sample_is_exchanged_once_and_different_ones_in_turn(rows, distinct):
    rows = list(rows)
    found = list(thirds(rows, distinct, min(len(rows), 3)))
    assert [sum(not one.stays[i] for one in found) for i in range(len(rows))] == [1] * len(rows)
    for one in found:
        assert any(one.stays)
        exchanged = [i for i, stay in enumerate(one.stays) if not stay]
        assert all(one.stays[one.rows[i]] for i in exchanged)
        assert sum(rows[i] in distinct for i in set(exchanged)) <= 1 or len(set(rows)) == 1


def test_ranks_exchange_as_often_however_few_samples_they_have():
    assert len(list(thirds([0, 0], [0], 3))) == 3


def listed(perturbed):
    return perturbed.rows.tolist(), perturbed.stays.tolist()


def test_samples_in_other_places():
    assert listed(replaced(3, {2: 0})) == ([0, 1, 0], [True, True, False])
    assert listed(replaced(3, {1: 2, 2: 1})) == ([0, 2, 1], [True, False, False])
    assert listed(replaced(2, {})) == ([0, 1], [True, True])


def test_one_more_stands_in_front_and_behind_and_has_no_place():
    front, behind = one_more(3)
    assert listed(front) == ([2, 0, 1, 2], [True] * 3)
    assert listed(behind) == ([0, 1, 2, 0], [True] * 3)
    assert front.same.tolist() == [False, True, True, True]
    assert behind.same.tolist() == [True, True, True, False]
    assert listed(enlarged(3, 1)) == ([0, 1, 2], [True, False, True])
    assert enlarged(3, 1).same.tolist() == [True, False, True]
    assert enlarged(3, 1).larger == 1
