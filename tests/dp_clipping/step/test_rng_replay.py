"""Random numbers of a backward that runs twice."""

import pytest
import torch

from dp_clipping.step.rng_replay import Randomness


@pytest.fixture
def now():
    torch.manual_seed(3)
    return Randomness(torch.zeros(1))


def test_drawing_is_seen(now):
    assert not now.has_moved
    torch.rand(1)
    assert now.has_moved


def test_the_same_numbers_come_again_and_others_after_them(now):
    first, second = torch.rand(4), torch.rand(4)
    for _ in range(2):
        with now.again():
            assert not now.has_moved
            assert torch.equal(torch.rand(4), first)
    third = torch.rand(4)
    torch.manual_seed(3)
    assert all(torch.equal(torch.rand(4), x) for x in (first, second, third))


def test_an_error_inside_leaves_the_generator_where_it_was(now):
    torch.rand(4)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), now.again():
        torch.rand(9) @ torch.rand(8)
    assert torch.equal(torch.get_rng_state(), before)
