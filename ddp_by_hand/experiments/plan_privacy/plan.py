"""Chooses model size, steps and batch for a budget: the lowest loss that a law predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_by_hand.experiments.plan_privacy.law import Law
from ddp_by_hand.experiments.plan_privacy.noise import NoiseTable, exact_noise
from dp_clipping.accounting.target_epsilon import LOWEST_OF_OPACUS as LOWEST

TRIED = 80  # numbers of steps that are compared for a model size
CLOSE = 0.01  # a loss so much higher is as good
SPREAD = 100.0  # the curve of loss and compute goes so far to both sides of the budget


@dataclass(frozen=True)
class Budget:
    """What a training may spend: (ε, δ), the N units of its data, and FLOPs in all."""

    epsilon: float
    delta: float
    examples: int
    flops: float


class Candidate(NamedTuple):
    parameters: float
    steps: float
    batch: float
    sigma: float
    loss: float

    @property
    def ratio(self) -> float:
        """Returns the noise-batch ratio σ / B."""
        return self.sigma / self.batch

    def flops(self, tokens: int) -> float:
        """Returns 6 · M · B · S · T (Kaplan et al. 2020), of examples of S tokens."""
        return 6 * self.parameters * self.batch * tokens * self.steps


class Planner:
    """Searches the best training of a budget under a law.

    Raises ValueError where δ is 1 / N or more, and from `best` where nothing lies within the law.
    """

    def __init__(self, law: Law, budget: Budget, sizes: Sequence[float]) -> None:
        if budget.delta >= 1 / budget.examples:
            raise ValueError(
                f"--delta is {budget.delta:g}, not below 1 / examples = {1 / budget.examples:.2g}: "
                "with such a δ an example may be published outright; leave it out, or give less"
            )
        self.law, self.budget, self.sizes = law, budget, tuple(sizes)
        self.least = max(
            1.0, LOWEST / law.ratios[1]
        )  # smaller batches have more noise than any run
        if self.least >= budget.examples:
            raise ValueError(
                f"--examples is {budget.examples}, and the law begins at batches of "
                f"{self.least:.0f}: give more, or the law of your own runs by --law FOLDER"
            )
        rates = (self.least / budget.examples, 1.0)
        self.noise = NoiseTable(budget.epsilon, budget.delta, rates, law.steps)

    def along(self, parameters: float, flops: float | None = None) -> list[Candidate]:
        """Returns the candidates of a model size that spend all of the FLOPs, by growing batch.

        Their steps are within the law's range and their batch is at most N. One with more noise
        than the law was fitted to is left out; one with less counts as the least noisy of it.
        """
        flops = self.budget.flops if flops is None else flops
        steps = np.geomspace(*self.law.steps[::-1], TRIED)
        batch = flops / (6 * parameters * self.law.tokens * steps)
        fits = (batch >= self.least) & (batch <= self.budget.examples)
        steps, batch = steps[fits], batch[fits]
        sigma = self.noise(batch / self.budget.examples, steps)
        low, high = self.law.ratios
        loss = self.law.loss(parameters, steps, np.maximum(sigma / batch, low))
        columns = (steps, batch, sigma, np.broadcast_to(loss, steps.shape))
        rows = zip(*(x.tolist() for x in columns), strict=True)
        found = [Candidate(parameters, *row) for row in rows]
        return [one for one in found if one.ratio <= high]

    def best_of(self, parameters: float, flops: float | None = None) -> Candidate | None:
        """Returns the candidate of a size with the lowest loss, or None if it has none."""
        return min(self.along(parameters, flops), key=lambda one: one.loss, default=None)

    def best(self, flops: float | None = None) -> Candidate:
        """Returns the candidate of all sizes with the lowest predicted loss."""
        found = [one for size in self.sizes if (one := self.best_of(size, flops))]
        if not found:
            law = self.law
            raise ValueError(
                f"--compute {flops or self.budget.flops:.2g} FLOPs: no training of "
                f"{min(self.sizes):,.3g} parameters or more, {law.steps[0]:,.0f} steps or more and "
                f"a noise-batch ratio up to {law.ratios[1]:.2g} fits; give more compute or "
                "examples, or other --parameters"
            )
        return min(found, key=lambda one: one.loss)

    def curve(self, points: int = 41) -> list[tuple[float, Candidate]]:
        """Returns (FLOPs, the best training that needs at most so many), around the budget."""
        middle = self.budget.flops
        found: list[tuple[float, Candidate]] = []
        for flops in np.geomspace(middle / SPREAD, middle * SPREAD, points).tolist():
            own = [one for size in self.sizes if (one := self.best_of(size, flops))]
            own += [one for _, one in found[-1:]]
            if own:
                found.append((flops, min(own, key=lambda one: one.loss)))
        return found

    def enough(self, chosen: Candidate) -> float:
        """Returns the FLOPs, up to the budget, that reach the loss to within `CLOSE`."""
        reached = [flops for flops, one in self.curve() if one.loss <= (1 + CLOSE) * chosen.loss]
        return min([self.budget.flops, *reached])

    def exact(self, chosen: Candidate, accountant: str) -> Candidate:
        """Returns it with whole steps and batch, σ by an accountant, and the loss of these."""
        steps, batch = round(chosen.steps), round(chosen.batch)
        budget = self.budget
        rate = min(1.0, batch / budget.examples)
        sigma = exact_noise(budget.epsilon, budget.delta, rate, steps, accountant)
        ratio = max(sigma / batch, self.law.ratios[0])
        loss = float(self.law.loss(chosen.parameters, steps, ratio))
        return Candidate(chosen.parameters, steps, batch, sigma, loss)


def sizes_of(law: Law, count: int = 9) -> list[float]:
    """Returns model sizes over the range of a law."""
    return np.geomspace(*law.parameters, count).tolist()
