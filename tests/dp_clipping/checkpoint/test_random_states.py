"""Random states of torch, NumPy and Python that a checkpoint restores."""

import random

import numpy as np
import pytest
import torch

from dp_clipping.checkpoint.random_states import (
    is_random_state,
    random_states,
    set_random_state,
)
from tests.support.saved_runs import build


def drawn():
    """Numbers of each kind: a generator of normal numbers keeps every other one."""
    return [
        torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random(),
    ]  # fmt: skip


@pytest.mark.parametrize("before", [0, 1], ids=["even", "odd"])
def test_random_numbers_go_on_where_they_were(before):
    run = build().engine._runs[0]
    for _ in range(before):
        np.random.randn(), random.gauss(0, 1)
    states = random_states(run)
    assert all(map(is_random_state, states))
    first = drawn()
    set_random_state(run, states)
    assert drawn() == first
    assert drawn() != first


def test_those_of_other_ranks_are_left_alone():
    run = build().engine._runs[0]
    states = random_states(run) * 2  # of two ranks: no rank is the one that it was
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    set_random_state(run, states)
    assert torch.equal(torch.rand(3), expected)


def test_files_of_earlier_versions_have_those_of_torch():
    run = build().engine._runs[0]
    states = [{"cpu": one["cpu"]} for one in random_states(run)]
    assert is_random_state(states[0])
    first = torch.rand(3)
    set_random_state(run, states)
    assert torch.equal(torch.rand(3), first)


def test_another_generator_of_numpy_is_left_alone():
    run = build().engine._runs[0]
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        states = random_states(run)
        assert is_random_state(states[0])
        set_random_state(run, states)
        assert np.random.randn() != np.random.randn()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": torch.zeros(3, dtype=torch.uint8)},
        {"numpy": torch.zeros(3, dtype=torch.uint8)},
        {"python": torch.zeros(2520)},
        {"other": torch.zeros(3, dtype=torch.uint8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_state(change):
    (states,) = random_states(build().engine._runs[0])
    assert is_random_state(states)
    assert not is_random_state(states | change)
    assert not is_random_state([states])
