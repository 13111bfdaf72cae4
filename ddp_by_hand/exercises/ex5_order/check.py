"""The properties of exercise 5. The ranks take the branches of a network in different orders."""

import itertools
from functools import partial

import torch.distributed as dist
from torch import nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    Branches,
    Gradients,
    branches_loss,
    during_backward,
    expect_gradients,
    expect_overlap,
    launch_names,
    local_gradients,
    mean_gradients,
    same,
    step,
    wrap,
)

WORLD_SIZES = (2,)
wrapped = partial(wrap, name="OrderedDDP")
ORDERS = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]


def own_order(rank: int) -> list[int]:
    return ORDERS[rank]


def expect_mean(rank: Rank, model: nn.Module, seed: int, which) -> None:
    losses = [branches_loss(seed, which)]
    expected = mean_gradients(Branches(seed=0), losses, rank.world_size)
    own = [local_gradients(Branches(seed=0), losses, r) for r in range(rank.world_size)]
    for name, parameter in model.module.named_parameters():
        if not same(parameter.grad, expected[name]):
            mixture = find_mixture(parameter.grad, own)
            if mixture:
                raise Wrong(
                    f"{name}.grad mixes different parameters, and no error was raised: it is the "
                    f"mean of {' and '.join(mixture)}; start in one order on every rank"
                )
    expect_gradients(model, expected)


def find_mixture(gradient, own: list[Gradients]) -> list[str] | None:
    """Returns `["a on rank 0", "b on rank 1"]` if the gradient is the mean of these."""
    if gradient is None:
        return None
    for names in itertools.product(*own):
        parts = [g[name] for g, name in zip(own, names, strict=True)]
        fits = all(part is not None and part.shape == gradient.shape for part in parts)
        if fits and same(gradient, sum(parts) / len(parts)):
            return [f"{name} on rank {r}" for r, name in enumerate(names)]
    return None


def one_order(rank: Rank) -> None:
    """When all ranks take the branches in one order, gradients are means."""
    model = wrapped(rank)
    step(rank, model, 1, None)
    expect_mean(rank, model, 1, None)


def overlap(rank: Rank) -> None:
    """The first all-reduce starts before the last gradient is accumulated, and none blocks."""
    model = wrapped(rank)
    step(rank, model, 1, None)
    expect_overlap(rank, "none was started during backward: it is right and it is exercise 1")


def different_orders(rank: Rank) -> None:
    """When each rank takes them in its own order, gradients are still means."""
    model = wrapped(rank)
    step(rank, model, 1, own_order)
    expect_mean(rank, model, 1, own_order)


def same_sequence(rank: Rank) -> None:
    """All ranks start the same reductions in the same order."""
    model = wrapped(rank)
    step(rank, model, 1, own_order)
    mine = launch_names(rank, model.module)
    everyone = [mine] * rank.world_size
    dist.all_gather_object(everyone, mine)
    for other, theirs in enumerate(everyone):
        for number, (a, b) in enumerate(zip(everyone[0], theirs, strict=False)):
            if a != b:
                raise Wrong(f"reduction {number + 1} is of {a} on rank 0, of {b} on rank {other}")


def later_steps(rank: Rank) -> None:
    """Two more steps in yet other orders are right and overlap too."""
    model = wrapped(rank)
    early = []
    for seed in range(3):
        model.zero_grad()

        def which(r: int, seed=seed) -> list[int]:
            return ORDERS[(r + seed) % 3]

        rank.record.clear()
        step(rank, model, seed, which)
        early.append(any(e.what == "all_reduce" for e in during_backward(rank)))
    expect_mean(rank, model, 2, which)
    if not early[-1] and early[0]:
        raise Wrong("step 3 starts nothing during backward: has the place in the order been reset?")


PROPERTIES = [one_order, overlap, different_orders, same_sequence, later_steps]
