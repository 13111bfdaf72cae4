"""Random states of torch, NumPy and Python that a checkpoint restores."""

import random

import numpy as np
import pytest
import torch

from dp_clipping.checkpoint.random_states import set_states, states_of

CPU = torch.device("cpu")


def drawn():
    """Numbers of each kind: a generator of normal numbers keeps every other one."""
    return [
        torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random(),
    ]  # fmt: skip


@pytest.mark.parametrize("before", [0, 1], ids=["even", "odd"])
def test_random_numbers_go_on_where_they_were(before):
    for _ in range(before):
        np.random.randn(), random.gauss(0, 1)
    states = states_of(CPU)
    first = drawn()
    set_states(states, CPU)
    assert drawn() == first
    assert drawn() != first


def test_files_of_earlier_versions_have_those_of_torch():
    states = {"cpu": states_of(CPU)["cpu"]}
    first = torch.rand(3)
    set_states(states, CPU)
    assert torch.equal(torch.rand(3), first)


def test_another_generator_of_numpy_is_left_alone():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        states = states_of(CPU)
        set_states(states, CPU)
        assert np.random.randn() != np.random.randn()
    finally:
        np.random.set_bit_generator(before)
