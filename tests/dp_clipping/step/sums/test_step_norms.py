"""Norms of one backward, by parameter."""

import torch
from torch.nn import Parameter

from dp_clipping.clipping.norms import Norm
from dp_clipping.distributed.norm_reduce import NormReducer
from dp_clipping.profiling.timer import Timer
from dp_clipping.step.sums.step_norms import StepNorms
from tests.dp_clipping.conftest import trained

A, B = trained(Parameter(torch.zeros(2)), "a"), trained(Parameter(torch.zeros(3)), "b")


def norms(a: int = 0, b: int = 0) -> StepNorms:
    """Of two parameters, of these clipping groups."""
    A.group, B.group = a, b
    made = StepNorms([B, A], NormReducer(), None, Timer(), torch.zeros(()), 2)
    made.begin(1 + max(a, b))
    made.table.add(A, Norm(torch.tensor([1.0, 4.0])))
    made.table.add(B, Norm(torch.tensor([9.0, 16.0])))
    return made


def test_they_add_up_within_a_group():
    squared, bounds = norms().squares_and_bounds()
    assert squared.tolist() == [[10.0, 20.0]]
    assert (bounds >= squared).all()
    squared, _ = norms(b=1).squares_and_bounds()
    assert squared.tolist() == [[1.0, 4.0], [9.0, 16.0]]


def test_some_samples():
    table = norms().table.of_good(torch.tensor([False, True]))
    assert table.squared().tolist() == [[0.0, 20.0]]


def test_one_rank_exchanges_nothing():
    made = norms()
    made.launch()
    made.squares_and_bounds()
    assert not made.leave_early
    assert made.own_squares() is None
    made.begin(1)
    assert not len(made.table)
    assert made.table.squared().tolist() == [[0.0, 0.0]]
