"""Poisson sampling: its rate, its spread, and what its loader is told of batches."""

import math
from collections import deque

import numpy as np
import pytest
import torch

from dp_clipping.sampling.poisson import PoissonSampler, included
from dp_clipping.sampling.usage import Ticket
from tests.support.draws import KEY

FROZEN = [6, 26, 46, 54, 57]  # draw 5 of 60 samples at rate 0.1


class TestMask:
    def test_rate_of_each_sample_and_spread_of_each_draw(self):
        num_samples, steps, rate = 400, 1000, 0.2
        masks = torch.stack([included(KEY, s, num_samples, rate) for s in range(steps)]).double()
        of_samples = masks.sum(0)
        bound = 5 * math.sqrt(steps * rate * (1 - rate))
        assert bound < steps * rate / 3
        assert ((of_samples - steps * rate).abs() < bound).all()
        # A fixed batch size would have variance 0; that of a variance is about 2σ⁴/n.
        variance = num_samples * rate * (1 - rate)
        assert abs(masks.sum(1).var() / variance - 1) < 5 * math.sqrt(2 / steps)

    @pytest.mark.parametrize("rate", [0.1, 1 / 3, 2.0**-40, 1.0])
    def test_compares_all_64_bits_and_rounds_down(self, rate, monkeypatch):
        limit = math.floor(rate * 2**64)
        raw = np.array([0, limit - 1, min(limit, 2**64 - 1), 2**64 - 1], dtype=np.uint64)

        class Fixed:
            def __init__(self, key, counter):
                pass

            def random_raw(self, size):
                return raw[:size]

        monkeypatch.setattr(np.random, "Philox", Fixed)
        expected = [True, True, rate == 1, rate == 1]
        assert included(KEY, 0, 4, rate).tolist() == expected

    def test_is_a_pure_function_and_stays_the_same(self):
        # Written down once: a checkpoint of an earlier version must redraw the same samples.
        assert included(KEY, 5, 60, 0.1).nonzero().flatten().tolist() == FROZEN
        assert included(KEY, 5, 60, 0.1).dtype == torch.bool

    def test_a_sample_does_not_depend_on_how_many_there_are(self):
        long = included(KEY, 3, 1003, 0.3)
        for length in (1, 2, 5, 998):
            assert torch.equal(included(KEY, 3, length, 0.3), long[:length])


class TestSampler:
    def sampler(self, **changes):
        options = dict(num_samples=103, sample_rate=0.2, steps=6, key=KEY) | changes
        return PoissonSampler(**options)

    def test_its_loader_says_which_batches_it_yields(self):
        """It may prefetch them."""
        sampler = self.sampler()
        assert len(sampler) == 6
        yielded, sampler.epoch = deque(), range(3, 5)
        sampler.yielded = yielded
        batches = list(sampler)
        assert batches == [sampler.shares(3)[0], sampler.shares(4)[0]]
        assert list(yielded) == [Ticket(len(batch)) for batch in batches]
