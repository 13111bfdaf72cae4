"""Generators that are put back, and dropout that is off."""

import random

import numpy as np
import torch
from torch import nn

from dp_clipping.trials.randomness import RandomStates, same_randomness


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)
        self.python, self.old = random.Random(0), np.random.RandomState(0)
        self.numpy = np.random.default_rng(0)


def test_every_generator_is_put_back():
    module = Drawing()
    before = RandomStates([module])
    with same_randomness([module]):
        for draw in (
            random.random,
            np.random.rand,
            lambda: torch.rand(1),
            lambda: torch.rand(1, generator=module.draw),
            module.python.random,
            module.old.rand,
            module.numpy.random,
        ):
            now = RandomStates([module])
            assert not now.have_moved
            draw()
            assert now.have_moved
    assert not before.have_moved
