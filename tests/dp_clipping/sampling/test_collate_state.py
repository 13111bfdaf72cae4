"""What calls of a collate function change is set back."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from dp_clipping.sampling.collate_state import CollateState

GENERATOR = random.Random(0)


def of_globals(_):
    return random.random(), np.random.rand(), torch.rand(()).item()


def of_a_named_global(_):
    return GENERATOR.random()


class Own:
    def __init__(self):
        self.calls, self.old = 0, np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def __call__(self, _):
        self.calls += 1
        return self.calls, self.old.rand(), torch.rand((), generator=self.torch).item()


def of_a_closure():
    calls, generator = 0, np.random.default_rng(0)

    def collate_fn(_):
        nonlocal calls
        calls += 1
        return calls, generator.random()

    return collate_fn


def of_an_argument(generator, _):
    return generator.random()


FUNCTIONS = {
    "globals": of_globals,
    "named global": of_a_named_global,
    "object": Own(),
    "method": Own().__call__,
    "closure": of_a_closure(),
    "partial": partial(of_an_argument, np.random.default_rng(0)),
    "partial of a partial": partial(partial(of_an_argument), random.Random(0)),
    "class": list,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_the_same_again(name):
    collate_fn = FUNCTIONS[name]
    state = CollateState(collate_fn)
    found = [collate_fn(()) for _ in range(3)]
    assert name == "class" or found[0] != found[1]
    state.restore()
    assert [collate_fn(()) for _ in range(3)] == found


def test_other_seeds_give_other_numbers_and_end():
    state = CollateState(of_globals)
    first = of_globals(())
    with state.seeded(0):
        state.restore()
        other = of_globals(())
    state.restore()
    assert of_globals(()) == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_whether_numbers_were_drawn():
    state = CollateState(of_globals)
    assert not state.has_drawn
    for draw in (random.random, np.random.rand, partial(torch.rand, ())):
        state.restore()
        before = state.drawn()
        draw()
        assert state.drawn() != before
        assert state.has_drawn
