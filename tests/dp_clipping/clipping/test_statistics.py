"""Statistics of the global norm vector: right, and the same on every rank."""

import math

import pytest
import torch

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.clipping.statistics import EDGES, NOT_COVERED, norm_statistics
from dp_clipping.distributed.norm_reduce import NormReducer


def of(norms: list[float], limit: float = 1.0):
    return norm_statistics(torch.tensor([norms]).square(), [limit])


def test_what_is_counted():
    found = of([0.0, 0.5, 1.0, 2.0, 1e3, math.inf, math.nan])
    assert (found.samples, found.nonfinite, found.clipped) == (7, 2, 2)
    assert found.clipped_by_group == (2,)
    assert found.clipped_fraction == 2 / 5
    assert sum(found.histogram) == 5
    assert len(found.histogram) == len(found.edges) + 1
    bins = [number for number, count in enumerate(found.histogram) if count]
    assert bins[0] == 0, "0 is below the lowest edge"
    assert bins[-1] == len(EDGES), "1000 is above the highest"
    assert [EDGES[b - 1] for b in bins[1:-1]] == [0.5, 1.0, 2.0], "an edge begins its bin"


def test_edges_follow_the_threshold():
    assert of([0.5, 3.0]).histogram == of([5.0, 30.0], limit=10.0).histogram
    assert of([1.0], limit=10.0).edges == tuple(10.0 * edge for edge in EDGES)


def test_clipping_groups():
    squares = torch.tensor([[1.0, 9.0, 0.0], [16.0, 1.0, 4.0]])
    found = norm_statistics(squares, [2.0, 3.0])
    assert found.clipped_by_group == (1, 1)
    assert found.clipped == 2
    assert found.edges[len(EDGES) // 2] == pytest.approx(13**0.5)


def test_text_says_that_epsilon_does_not_cover_it():
    found = of([0.5, 3.0])
    assert str(found) == f"{found!r}\n{NOT_COVERED}"


@pytest.mark.parametrize("groups", [1, 3])
def test_an_empty_batch(groups):
    found = norm_statistics(torch.zeros(groups, 0), [1.0] * groups)
    assert (found.samples, found.clipped_fraction, sum(found.histogram)) == (0, 0.0, 0)


SIZES = (3, 0, 1, 2)


def on_a_rank(context: Context, norms: list[float]):
    reducer = NormReducer(data_parallel_group=context.group)
    start = sum(SIZES[: context.rank])
    mine = torch.tensor(norms[start : start + SIZES[context.rank]])
    squares = reducer.gather(mine.square()[None]).wait()
    return norm_statistics(squares, [1.0])


def test_every_rank_has_those_of_one_process(cpu_ranks):
    norms = [0.1, 1.5, math.nan, 0.9, 77.0, 1.0]
    found = cpu_ranks.run(len(SIZES), on_a_rank, norms)
    assert found == [of(norms)] * len(SIZES)
