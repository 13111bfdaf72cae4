"""The properties of exercise 7. Each rank takes its own branches of a network."""

from functools import partial

from torch import nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    Branches,
    branches_loss,
    expect_gradients,
    mean_gradients,
    scaled,
    show,
    step,
    wrap,
)

WORLD_SIZES = (2,)
wrapped = partial(wrap, name="UnusedDDP")


def expect_mean(rank: Rank, model: nn.Module, seed: int, which) -> None:
    expected = mean_gradients(Branches(seed=0), [branches_loss(seed, which)], rank.world_size)
    by_users = scaled(expected, rank.world_size)  # where one rank used it
    hint = "the ranks must issue the same reductions, zeros where one has no gradient"
    mistake = "that was divided by the number of ranks that used it: divide by all"
    expect_gradients(model, expected, hint, {mistake: by_users})


def one_each(rank: int) -> list[int]:
    return [rank]


def only_rank_0(rank: int) -> list[int]:
    return [0, 1, 2] if rank == 0 else [0]


def all_used(rank: Rank) -> None:
    """When every rank uses everything, gradients are means."""
    model = wrapped(rank)
    step(rank, model, 1, None)
    expect_mean(rank, model, 1, None)


def used_by_one(rank: Rank) -> None:
    """What only rank 0 used has a gradient on both: its own, divided by two."""
    model = wrapped(rank)
    step(rank, model, 1, only_rank_0)
    expect_mean(rank, model, 1, only_rank_0)


def different_ones(rank: Rank) -> None:
    """When the ranks use different layers of one shape, nothing is mixed."""
    model = wrapped(rank)
    step(rank, model, 1, one_each)
    parameters = dict(model.module.named_parameters())
    used = {n: p for n, p in parameters.items() if not n.startswith("branches.2")}
    expected = mean_gradients(Branches(seed=0), [branches_loss(1, one_each)], rank.world_size)
    expected |= {n: p.grad for n, p in parameters.items() if n not in used}  # the next property
    hint = "different layers were mixed, or a rank did not contribute zeros"
    mistake = "that was divided by the number of ranks that used it: divide by all"
    expect_gradients(model, expected, hint, {mistake: scaled(expected, 2)})


def used_by_none(rank: Rank) -> None:
    """What no rank used keeps .grad None."""
    model = wrapped(rank)
    step(rank, model, 1, one_each)
    for name, parameter in model.module.named_parameters():
        if name.startswith("branches.2") and parameter.grad is not None:
            raise Wrong(
                f"{name}.grad is {show(parameter.grad)} and no rank used it: AdamW would decay it"
            )


def later_steps(rank: Rank) -> None:
    """The next step, with other layers used, remembers nothing of it."""
    model = wrapped(rank)
    step(rank, model, 1, one_each)
    model.zero_grad()
    step(rank, model, 2, lambda r: [2 - r])
    expect_mean(rank, model, 2, lambda r: [2 - r])


PROPERTIES = [all_used, used_by_one, different_ones, used_by_none, later_steps]
