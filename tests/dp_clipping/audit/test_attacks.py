"""Attacks on canaries: each ranks those that were in the data above the others."""

import math

import pytest
import torch
from torch import Tensor

from dp_clipping.audit.attacks import BOTH, TESTS, closeness, guesses, likelihood, variation

CANARIES, STEPS, RATE = 640, 12, 0.5


def run(spread: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a mechanism that does what it says shows of its canaries: y, s and the coins."""
    draw = torch.Generator().manual_seed(seed)
    included = torch.rand(CANARIES, generator=draw) < 0.5
    batches = (torch.rand(STEPS, CANARIES, generator=draw) < RATE) & included
    z = torch.randn(STEPS, CANARIES, generator=draw, dtype=torch.float64)
    return batches + spread * z, torch.full((STEPS,), spread, dtype=torch.float64), included


def test_likelihood_is_that_of_the_mechanism():
    y = torch.tensor([[0.3, 1.2], [-0.5, 0.9]], dtype=torch.float64)
    s = torch.tensor([0.7, 2.0], dtype=torch.float64)

    def density(x, mean, std):
        return math.exp(-((x - mean) ** 2) / (2 * std**2)) / std

    for canary in range(2):
        ratio = 1.0
        for step in range(2):
            x, std = y[step, canary].item(), s[step].item()
            ratio *= 0.25 * density(x, 1, std) / density(x, 0, std) + 0.75
        assert likelihood(y, s, 0.25)[canary].item() == pytest.approx(math.log(ratio))


def test_noise_that_repeats_is_seen_by_its_variation():
    *_, included = run(3.0)
    draw = torch.Generator().manual_seed(1)
    batches = (torch.rand(STEPS, CANARIES, generator=draw) < RATE) & included
    y = batches + 3.0 * torch.randn(CANARIES, generator=draw, dtype=torch.float64)
    top = variation(y).argsort(descending=True)[: CANARIES // 4]
    assert included[top].all()


def test_some_canaries_without_noise_are_seen_by_closeness():
    y, _, included = run(3.0)
    y[:, :40] = 0.0  # no noise: in no batch,
    y[0, :40] = included[:40].double()  # but for those that are in the first one
    ranks = closeness(y).argsort(descending=True)
    found = included[:40].sum().item()
    assert set(ranks[:found].tolist()) == set(included[:40].nonzero().flatten().tolist())
    assert set(ranks[found - 40 :].tolist()) == set((~included[:40]).nonzero().flatten().tolist())


def test_how_many_are_guessed_does_not_depend_on_the_coins():
    made = [
        [(g.attack, g.side, g.made, g.share) for g in guesses(*run(1.0, seed)[:2], RATE, coins)]
        for seed, coins in ((0, run(1.0, 0)[2]), (1, torch.zeros(CANARIES, dtype=torch.bool)))
    ]
    assert made[0] == made[1]
    assert sum(share for *_, share in made[0]) == pytest.approx(1.0)
    assert [m % 2 for _, side, m, _ in made[0] if side == BOTH] == [0] * (len(TESTS) - 1)
