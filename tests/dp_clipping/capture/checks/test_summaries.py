"""What a tensor has of each sample, in a few numbers."""

import pytest
import torch

from dp_clipping.capture.checks.summaries import SIGNS, summary
from dp_clipping.kernels import signed_sums
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.trials.seen import compared, differ

ROWS = Layout("dimension", 0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", [ROWS, Layout("dimension", 1)], ids=str)
def test_a_summary_is_of_each_sample_alone(layout):
    x = numbers(3, 4, 5).movedim(0, layout.dim)
    found = summary(x, layout, 3).values
    assert found.shape == (3, SIGNS + 1)
    alone = [summary(x.select(layout.dim, i).unsqueeze(layout.dim), layout, 1) for i in range(3)]
    torch.testing.assert_close(found, torch.cat([one.values for one in alone]))
    norms = x.movedim(layout.dim, 0).flatten(1).norm(dim=1)
    torch.testing.assert_close(found[:, -1], norms)


def test_samples_that_differ_are_told_and_others_do_not_count():
    x = numbers(3, 4, 5)
    y = x.clone()
    y[1] = y[1].flip(0)
    pair = summary(x, ROWS, 3), summary(y, ROWS, 3)
    assert differ([pair, pair[:1] * 2], torch.tensor([True, True, False])) == [True, False]
    assert differ([pair], torch.tensor([True, False, True])) == [False]
    assert differ([], torch.tensor([True])) == []


def test_rounding_is_no_difference_and_whole_numbers_have_none():
    x, ids, all_stay = numbers(2, 8), torch.tensor([[100_000], [7]]), torch.tensor([True, True])
    rounded = summary(x, ROWS, 2), summary(x * (1 + 1e-6), ROWS, 2)
    whole = summary(ids, ROWS, 2), summary(ids + 1, ROWS, 2)
    assert differ([rounded, whole], all_stay) == [False, True]


def test_what_is_not_finite_is_zero_and_nothing_has_a_summary():
    bad = summary(torch.tensor([[torch.nan, 1.0], [1.0, 1.0]]), ROWS, 2)
    zero = summary(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), ROWS, 2)
    assert differ([(bad, zero), (zero, bad)], torch.tensor([True, True])) == [False, False]
    change, room = compared([(bad, zero)])
    assert change.isfinite().all()
    assert room.isfinite().all()
    assert (summary(torch.ones(2, 0), ROWS, 2).values == 0).all()


@pytest.mark.parametrize(("place", "others"), [(0, slice(1, None)), (-1, slice(2))])
def test_another_sample_in_front_or_behind(place, others):
    x = numbers(3, 4)
    torch.testing.assert_close(
        summary(x, ROWS, 3).without(place).values, summary(x[others], ROWS, 2).values
    )


def test_long_rows_are_summed_in_pieces(monkeypatch):
    monkeypatch.setattr(signed_sums, "PIECE", 8)
    x = numbers(3, 29)
    for place in range(29):
        other = x.clone()
        other[1, place] += 0.01
        stays = torch.tensor([True, True, False])
        assert differ([(summary(x, ROWS, 3), summary(other, ROWS, 3))], stays) == [True]
