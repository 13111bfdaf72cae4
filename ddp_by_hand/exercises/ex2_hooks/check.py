"""The properties of exercise 2."""

from functools import partial

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    Branches,
    branches_loss,
    during_backward,
    expect_gradients,
    expect_parameters_left_alone,
    local_gradients,
    mean_gradients,
    scaled,
    step,
    wrap,
)

WORLD_SIZES = (2,)
wrapped = partial(wrap, name="OverlapDDP")


def gradients(rank: Rank) -> None:
    """After finish every gradient is the mean over the ranks."""
    model = wrapped(rank)
    step(rank, model, 1)
    expected = mean_gradients(Branches(seed=0), [branches_loss(1)], rank.world_size)
    own = local_gradients(Branches(seed=0), [branches_loss(1)], rank.rank)
    sums = scaled(expected, rank.world_size)
    expect_parameters_left_alone(rank, model.module)
    if any(e.what == "changed" for e in rank.record.events):
        raise Wrong(
            "a gradient was changed between the start of its all-reduce and handle.wait(), in a "
            "race with it: divide after the wait"
        )
    mistakes = {
        "that is the sum over the ranks": sums,
        "that is this rank's own: reduce parameter.grad itself, after it was accumulated": own,
    }
    expect_gradients(model, expected, mistakes=mistakes)


def overlap(rank: Rank) -> None:
    """The first all-reduce starts before the last gradient is accumulated."""
    model = wrapped(rank)
    step(rank, model, 1)
    started = sum(e.what == "all_reduce" for e in during_backward(rank))
    if not started:
        raise Wrong(
            "none was started before the last gradient: start each one in the hook, not in finish"
        )


def nothing_blocks(rank: Rank) -> None:
    """Nothing blocks during backward."""
    model = wrapped(rank)
    step(rank, model, 1)
    before_the_end = during_backward(rank)
    if any(e.what == "all_reduce" and not e.asynchronous for e in before_the_end):
        raise Wrong("an all-reduce without async_op=True holds up the backward pass")
    if any(e.what == "wait" for e in before_the_end):
        raise Wrong("a handle is waited for inside a hook: wait in finish")


def once(rank: Rank) -> None:
    """Every gradient is reduced once per step."""
    model = wrapped(rank)
    step(rank, model, 1)
    count = len(rank.record.calls("all_reduce"))
    expected = len(list(model.module.parameters()))
    if count != expected:
        raise Wrong(f"{count} all-reduces for {expected} gradients")


def handles(rank: Rank) -> None:
    """In each of three steps finish waits for this step's handles and no others."""
    model = wrapped(rank)
    waits = []
    for seed in range(3):
        rank.record.clear()
        step(rank, model, seed)
        model.zero_grad()
        waits.append(sum(e.what == "wait" for e in rank.record.events))
    expected = len(list(model.module.parameters()))
    if waits[0] < expected:
        raise Wrong(f"{waits[0]} waits for {expected} reductions: some may still be under way")
    if waits != [expected] * 3:
        raise Wrong(f"waits per step: {waits}; handles of earlier steps are kept, clear the list")


def later_steps(rank: Rank) -> None:
    """The third step's gradients are means as well."""
    model = wrapped(rank)
    for seed in range(3):
        model.zero_grad(set_to_none=seed == 1)
        step(rank, model, seed)
        expected = mean_gradients(Branches(seed=0), [branches_loss(seed)], rank.world_size)
        first = "wrong in the first step already: see the first property"
        left = f"right until step {seed}: what is left over from it?"
        expect_gradients(model, expected, left if seed else first)


PROPERTIES = [gradients, overlap, nothing_blocks, once, handles, later_steps]
