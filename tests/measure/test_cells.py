"""The order of cells: complete, balanced, and the same on every rank."""

from collections import Counter
from itertools import pairwise

import pytest

from ddp_by_hand.measure.cells import plan_rounds


def _rounds(n, rounds, seed):
    order = plan_rounds([f"cell{i}" for i in range(n)], rounds, seed)
    return [[cell for number, cell in order if number == r] for r in range(rounds)]


def _predecessors(row):
    return dict(pair[::-1] for pair in pairwise(row))


@pytest.mark.parametrize("n", range(1, 10))
def test_every_round_runs_every_cell_once_and_in_sequence(n):
    order = plan_rounds(list(range(n)), 6, seed=1)
    assert [number for number, _ in order] == [r for r in range(6) for _ in range(n)]
    for r in range(6):
        assert sorted(cell for number, cell in order if number == r) == list(range(n))


@pytest.mark.parametrize("n", range(2, 10))
def test_design_is_balanced(n):
    rounds = n if n % 2 == 0 else 2 * n
    rows = _rounds(n, rounds, seed=5)
    pairs = Counter(pair for row in rows for pair in _predecessors(row).items())
    assert set(pairs.values()) == {rounds * (n - 1) // (n * (n - 1))}
    assert len(pairs) == n * (n - 1)
    positions = Counter((cell, i) for row in rows for i, cell in enumerate(row))
    assert set(positions.values()) == {rounds // n}


def test_seed_matters_and_there_may_be_no_cells():
    cells = [{"name": name} for name in "abcdefg"]
    assert plan_rounds(cells, 2, 0) != plan_rounds(cells, 2, 1)
    order = [(0, "b"), (0, "a"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert plan_rounds("abc", 2, 9) == order  # in any process
    assert [cell["name"] for cell in cells] == list("abcdefg")
    assert plan_rounds([], 3, 0) == []
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        plan_rounds(["a"], 0, 0)
