"""The properties of exercise 1."""

import torch
from torch import nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    difference,
    expect_gradients,
    expect_parameters_left_alone,
    local_gradients,
    mean_gradients,
    numbers,
    scaled,
    show,
)

WORLD_SIZES = (2, 3)


class Network(nn.Module):
    """Parameters, one frozen, and buffers of two dtypes, with other values on every rank."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(6, 3)
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked.fill_(100 + seed)

    def forward(self, x):
        return self.last(torch.relu(self.frozen(self.norm(self.first(x)))))


def loss_of(seed: int):
    return lambda model, rank: model(numbers(5, 4, seed=seed, rank=rank)).square().sum()


def parameters(rank: Rank) -> None:
    """Every rank begins with rank 0's parameters, the frozen ones too."""
    expect_rank_0(rank, "named_parameters", "broadcast every parameter, trainable or not")


def buffers(rank: Rank) -> None:
    """Every rank begins with rank 0's buffers."""
    expect_rank_0(rank, "named_buffers", "broadcast module.buffers() too")


def expect_rank_0(rank: Rank, which: str, hint: str) -> None:
    model = rank.solution.AverageDDP(Network(rank.rank))
    for name, value in getattr(Network(0), which)():
        mine = dict(getattr(model.module, which)())[name]
        if not torch.equal(mine, value):
            raise Wrong(
                f"{name} is {show(mine)} on rank {rank.rank} and {show(value)} on rank 0; {hint}"
            )


def forward(rank: Rank) -> None:
    """The wrapped network gives what the network gives."""
    model = rank.solution.AverageDDP(Network(0)).eval()
    x = numbers(5, 4, seed=1, rank=rank.rank)
    if not torch.equal(model(x), Network(0).eval()(x)):
        raise Wrong("forward must return module(...) unchanged")


def gradients(rank: Rank) -> None:
    """After finish every gradient is the mean over the ranks."""
    model = rank.solution.AverageDDP(Network(rank.rank))
    loss_of(1)(model, rank.rank).backward()
    model.finish_gradient_synchronization()
    expected = mean_gradients(Network(0), [loss_of(1)], rank.world_size)
    mistakes = {
        "that is the sum over the ranks, divide by their number": scaled(expected, rank.world_size),
        "that is this rank's own, nothing was averaged": local_gradients(
            Network(0), [loss_of(1)], rank.rank
        ),
    }
    expect_gradients(model, expected, mistakes=mistakes)


def parameters_stay(rank: Rank) -> None:
    """Finish reduces gradients and leaves the parameters alone."""
    model = rank.solution.AverageDDP(Network(rank.rank))
    before = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    loss_of(1)(model, rank.rank).backward()
    model.finish_gradient_synchronization()
    expect_parameters_left_alone(rank, model.module)
    moved = [n for n, p in model.module.named_parameters() if not torch.equal(p, before[n])]
    if moved:
        raise Wrong(f"{moved[0]} has changed; reduce parameter.grad, not the parameter")


def training(rank: Rank) -> None:
    """After three steps the replicas are still equal, and not where they began."""
    model = rank.solution.AverageDDP(Network(rank.rank))
    alone = Network(0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    for step in range(3):
        mean = mean_gradients(alone, [loss_of(step)], rank.world_size)
        loss_of(step)(model, rank.rank).backward()
        model.finish_gradient_synchronization()
        for name, parameter in alone.named_parameters():
            parameter.grad = mean[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(
        model.module.named_parameters(), alone.parameters(), strict=True
    ):
        if not torch.allclose(mine, theirs, 1e-4, 1e-5):
            raise Wrong(difference(name, mine, theirs))


PROPERTIES = [parameters, buffers, forward, gradients, parameters_stay, training]
