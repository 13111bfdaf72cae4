"""The properties of exercise 14, beside a loop over all ranks in one process."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import difference, numbers, same

WORLD_SIZES = (2, 3)
EVERY, OUTER_LR, OUTER_MOMENTUM = 3, 0.6, 0.5
INNER = {"lr": 0.05, "momentum": 0.9}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def backward(model: nn.Module, seed: int, rank: int) -> None:
    model(numbers(4, 4, seed=seed, rank=rank)).square().sum().backward()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@dataclass
class Loop:
    """The right training of all ranks, and variations of it that are usual mistakes."""

    ranks: int
    sign: float = 1.0
    mean: bool = True
    is_nesterov: bool = True
    keeps_momentum: bool = True
    workers: list[nn.Module] = field(init=False)

    def run(self, rounds: int) -> Tensor:
        """Returns the parameters after so many rounds, which all ranks have."""
        self.workers = [network() for _ in range(self.ranks)]
        optimizers = [torch.optim.SGD(worker.parameters(), **INNER) for worker in self.workers]
        start = flat(self.workers[0])
        momentum = torch.zeros_like(start)
        for round_ in range(rounds):
            for rank, worker in enumerate(self.workers):
                for step in range(EVERY):
                    optimizers[rank].zero_grad()
                    backward(worker, round_ * EVERY + step, rank)
                    optimizers[rank].step()
            delta = sum(start - flat(worker) for worker in self.workers) * self.sign
            delta = delta / self.ranks if self.mean else delta
            momentum = (OUTER_MOMENTUM * momentum if self.keeps_momentum else 0) + delta
            ahead = delta + OUTER_MOMENTUM * momentum if self.is_nesterov else momentum
            start = start - OUTER_LR * ahead
            for worker in self.workers:
                nn.utils.vector_to_parameters(start.clone(), worker.parameters())
        return start


MISTAKES = {
    "every rank has moved uphill: delta is start minus where a rank is now": {"sign": -1.0},
    "that is the sum over the ranks: divide delta": {"mean": False},
    "that is momentum without Nesterov's look ahead: delta + outer_momentum * momentum": {
        "is_nesterov": False
    },
    "momentum begins anew in each round: keep it": {"keeps_momentum": False},
}


def wrapped(rank: Rank) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = rank.solution.LocalStepsDDP(network(rank.rank), EVERY, OUTER_LR, OUTER_MOMENTUM)
    optimizer = model.make_optimizer(torch.optim.SGD, **INNER)
    rank.record.clear()
    return model, optimizer


def train(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, rank.rank)
        model.finish_gradient_synchronization()
        optimizer.step()


def expect(rank: Rank, model: nn.Module, rounds: int) -> None:
    found, right = flat(model.module), Loop(rank.world_size).run(rounds)
    if same(found, right):
        return
    for sentence, changed in MISTAKES.items():
        if same(found, Loop(rank.world_size, **changed).run(rounds)):
            raise Wrong(sentence)
    raise Wrong(difference("the parameters, flat,", found, right))


def silent(rank: Rank) -> None:
    """The first steps of a round are this rank's own, and send nothing."""
    model, optimizer = wrapped(rank)
    alone = copy.deepcopy(model.module)
    plain = torch.optim.SGD(alone.parameters(), **INNER)
    for step in range(EVERY - 1):
        train(rank, model, optimizer, range(step, step + 1))
        plain.zero_grad()
        backward(alone, step, rank.rank)
        plain.step()
    if calls := rank.record.calls():
        raise Wrong(f"{calls[0].what} in step {EVERY - 1} or before: only number {EVERY} sends")
    if not same(flat(model.module), flat(alone)):
        raise Wrong(difference("the parameters, flat,", flat(model.module), flat(alone)))


def one_round(rank: Rank) -> None:
    """Step number `every` ends where the outer step leads, on every rank."""
    model, optimizer = wrapped(rank)
    train(rank, model, optimizer, range(EVERY))
    if not rank.record.calls():
        raise Wrong(
            f"nothing was sent in {EVERY} steps: is outer_step called behind number {EVERY}?"
        )
    expect(rank, model, 1)


def more_rounds(rank: Rank) -> None:
    """Momentum and start go on from round to round."""
    model, optimizer = wrapped(rank)
    for round_ in range(3):
        train(rank, model, optimizer, range(round_ * EVERY, (round_ + 1) * EVERY))
        try:
            expect(rank, model, round_ + 1)
        except Wrong as wrong:
            raise Wrong(
                f"wrong from round {round_ + 1}: {wrong}; see start and the count"
            ) from None


def bytes_sent(rank: Rank) -> None:
    """A round sends as many numbers as there are parameters, once."""
    model, optimizer = wrapped(rank)
    train(rank, model, optimizer, range(EVERY))
    sent, whole = sum(call.numel for call in rank.record.calls()), flat(model.module).numel()
    if sent != whole:
        raise Wrong(f"{sent} numbers in a round, for {whole} parameters: send each delta once")


PROPERTIES = [silent, one_round, more_rounds, bytes_sent]
