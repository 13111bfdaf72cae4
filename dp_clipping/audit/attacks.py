"""Guesses which canaries were in the data, from the private gradients of their own numbers.

In each step the number of a canary gets y = b + s·z, where b is 1 if the canary was in the batch
and z is noise of standard deviation 1. An attack makes one score of the y of all steps: the larger,
the more likely was the canary in the data. Each finds other faults.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IN, BOTH = "in", "in and out"
TESTS = (
    ("likelihood", BOTH, 16, 0.7), ("likelihood", IN, 64, 0.1), ("closeness", BOTH, 16, 0.1),
    ("variation", BOTH, 16, 0.1),
)  # fmt: skip
"""Attack, side, of how many canaries one is guessed, and the test's part of 1 − confidence.
Few, since each of them makes the others' bounds lower."""


@dataclass(frozen=True)
class Guesses:
    """Guesses of one attack.

    Attributes:
        attack: how canaries were ranked.
        side: `"in"`: guessed to be in the data are those of the highest scores; `"in and out"`:
            half as many, and guessed not to be are as many of the lowest.
        made: guesses.
        correct: how many of these were right.
        share: the part of all errors that the bounds from these guesses may make.
    """

    attack: str
    side: str
    made: int
    correct: int
    share: float

    def __str__(self) -> str:
        return f"{self.correct} of {self.made} guesses right ({self.attack}, {self.side})"


def likelihood(y: Tensor, spread: Tensor, sample_rate: float) -> Tensor:
    """Returns the log-likelihood ratio of "in the data" to "not": [steps, m] -> [m].

    It is the best attack on a Gaussian mechanism with Poisson sampling that does what it says
    (J. Neyman and E. Pearson, 1933).

    Args:
        y: [steps, m] float64.
        spread: s of each step, [steps].
        sample_rate: q.
    """
    q = torch.tensor(sample_rate, dtype=torch.float64, device="cpu")
    ratio = (2 * y - 1) / (2 * spread[:, None] ** 2)
    return torch.logaddexp((1 - q).log(), q.log() + ratio).sum(0)


def variation(y: Tensor) -> Tensor:
    """Returns the variance over steps, [m]: large for a canary in some batches.

    It tells where noise repeats, or is missing.
    """
    return y.var(0, correction=0)


def closeness(y: Tensor) -> Tensor:
    """Returns how near each y is to 0 or 1, negative for canaries that are near 0 in all steps.

    It tells where some canaries have less noise than others.
    """
    out, into = y.square(), (y - 1).square()
    distance = torch.minimum(out, into).sum(0)
    return torch.where((into < out).any(0), 1.0, -1.0) / (distance + 1e-12)


def guesses(y: Tensor, spread: Tensor, sample_rate: float, included: Tensor) -> list[Guesses]:
    """Returns the guesses of all tests. How many are made depends on the number of canaries alone.

    Args:
        y, spread, sample_rate: as of `likelihood`.
        included: which canaries were in the data, bool [m].
    """
    scores = {
        "likelihood": likelihood(y, spread, sample_rate),
        "closeness": closeness(y),
        "variation": variation(y),
    }
    found = []
    for attack, side, part, share in TESTS:
        made = max(2, len(included) // part // 2 * 2)
        coins = included[scores[attack].argsort(descending=True)]
        top = made if side == IN else made // 2
        bottom = ~coins[len(coins) - (made - top) :]
        found.append(Guesses(attack, side, made, int(coins[:top].sum() + bottom.sum()), share))
    return found
