"""The properties of exercise 6."""

from contextlib import suppress
from functools import partial

from torch import nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    Branches,
    branches_loss,
    expect_gradients,
    local_gradients,
    mean_gradients,
    wrap,
)

WORLD_SIZES = (2,)
wrapped = partial(wrap, name="AccumulatingDDP")


class OutOfMemory(Exception):
    """An error raised inside the learner's `no_sync` block."""


def backward(rank: Rank, model: nn.Module, seed: int) -> None:
    branches_loss(seed)(model, rank.rank).backward()


def expect_mean(rank: Rank, model: nn.Module, seeds: list[int], hint: str = "") -> None:
    losses = [branches_loss(seed) for seed in seeds]
    own = local_gradients(Branches(seed=0), losses, rank.rank)
    last = mean_gradients(Branches(seed=0), losses[-1:], rank.world_size)
    expected = mean_gradients(Branches(seed=0), losses, rank.world_size)
    mistakes = {
        "that is the last microbatch alone": last,
        "that is this rank's own: it was not reduced": own,
    }
    expect_gradients(model, expected, hint, {hint or k: v for k, v in mistakes.items()})


def ordinary(rank: Rank) -> None:
    """Without no_sync the gradients are means, step after step."""
    model = wrapped(rank)
    for seed in range(2):
        model.zero_grad()
        backward(rank, model, seed)
        model.finish_gradient_synchronization()
    expect_mean(rank, model, [1])


def silent(rank: Rank) -> None:
    """Inside no_sync no collective starts."""
    model = wrapped(rank)
    with model.no_sync():
        backward(rank, model, 1)
        backward(rank, model, 2)
    calls = [call.what for call in rank.record.calls()]
    model.finish_gradient_synchronization()
    if calls:
        raise Wrong(f"{len(calls)} calls of {calls[0]}: the hook must look whether it may start")


def accumulation(rank: Rank) -> None:
    """Two backwards inside and one outside: the mean of the sum of all three."""
    model = wrapped(rank)
    with model.no_sync():
        backward(rank, model, 1)
        backward(rank, model, 2)
    backward(rank, model, 3)
    model.finish_gradient_synchronization()
    expect_mean(rank, model, [1, 2, 3])


def exception(rank: Rank) -> None:
    """After an exception inside no_sync the next backward synchronises again."""
    model = wrapped(rank)
    with suppress(OutOfMemory), model.no_sync():
        raise OutOfMemory
    backward(rank, model, 1)
    model.finish_gradient_synchronization()
    expect_mean(rank, model, [1], "synchronisation is still off: restore it in a `finally`")


def passes_on(rank: Rank) -> None:
    """An exception inside no_sync reaches the caller."""
    model = wrapped(rank)
    try:
        with model.no_sync():
            raise OutOfMemory
    except OutOfMemory:
        return
    raise Wrong("it was swallowed: `finally` restores and lets it pass, `except` alone does not")


def nested(rank: Rank) -> None:
    """The end of an inner block leaves the outer one silent."""
    model = wrapped(rank)
    with model.no_sync():
        with model.no_sync():
            backward(rank, model, 1)
        inner = rank.record.calls()
        backward(rank, model, 2)
    outer = rank.record.calls()
    backward(rank, model, 3)
    model.finish_gradient_synchronization()
    if inner:
        raise Wrong("a collective starts inside the inner block")
    if outer:
        raise Wrong("the inner block switched synchronisation on: restore what was there before it")
    expect_mean(rank, model, [1, 2, 3])


def nothing_to_finish(rank: Rank) -> None:
    """Finish after backwards inside no_sync only leaves the local sums."""
    model = wrapped(rank)
    with model.no_sync():
        backward(rank, model, 1)
    model.finish_gradient_synchronization()
    own = local_gradients(Branches(seed=0), [branches_loss(1)], rank.rank)
    expect_gradients(model, own, "only what was reduced may be divided")


PROPERTIES = [ordinary, silent, accumulation, exception, passes_on, nested, nothing_to_finish]
