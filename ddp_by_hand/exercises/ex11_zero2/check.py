"""The properties of exercise 11. The network has six layers, and a bucket holds one of them."""

from torch import nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import Branches, branches_loss, during_backward, step, wrap
from ddp_by_hand.exercises.sliced import (
    expect_left_alone,
    expect_slices_only,
    expect_steps_of_units,
    expect_unit_gradients,
    flats_in_memory,
)
from ddp_by_hand.exercises.transfer import SCATTERS

WORLD_SIZES = (2,)
LAYERS = 6
BUCKET_SIZE_MB = 80 / (1 << 20)  # the bytes of a layer
ON_THE_WIRE = 2


def network(seed: int) -> Branches:
    return Branches(seed, count=LAYERS - 1)


def wrapped(rank: Rank) -> nn.Module:
    module = network(rank.rank)
    return wrap(rank, "GradientShardedDDP", module, bucket_size_mb=BUCKET_SIZE_MB)


def gradients(rank: Rank) -> None:
    """After finish each own.grad is this rank's slice of the mean."""
    model = wrapped(rank)
    step(rank, model, 1)
    expect_unit_gradients(rank, model, network(0), branches_loss(1))


def traffic(rank: Rank) -> None:
    """Each bucket is reduce-scattered once, and nothing else is sent."""
    model = wrapped(rank)
    step(rank, model, 1)
    scattered = rank.record.calls(*SCATTERS)
    others = [e for e in rank.record.calls() if e.what not in SCATTERS]
    if others:
        raise Wrong(
            f"{others[0].what} of {others[0].numel} numbers: a reduce-scatter sends half of an "
            "all-reduce, and each rank steps its slice only"
        )
    if len(scattered) != len(model.units):
        raise Wrong(f"{len(scattered)} reduce-scatters for {len(model.units)} buckets")


def early(rank: Rank) -> None:
    """The first bucket starts during backward, and is not waited for where it starts."""
    model = wrapped(rank)
    step(rank, model, 1)
    under_way = starts = 0
    for event in during_backward(rank):
        if event.what in SCATTERS:
            under_way, starts = under_way + event.asynchronous, starts + 1
        elif event.what == "wait":
            under_way -= 1
        elif event.what == "gradient" and starts and not under_way:
            raise Wrong(
                f"nothing is on the wire while backward computes {event.detail}: the bucket before "
                "it was waited for where it started; wait for the last but one only"
            )
    if not starts:
        raise Wrong("no bucket was started during backward: start it in gradient_ready")


def what_stays(rank: Rank) -> None:
    """After finish a rank has its slices of the gradients, and nothing of the rest."""
    model = wrapped(rank)
    step(rank, model, 1)
    expect_slices_only(rank, model)


def memory(rank: Rank) -> None:
    """During backward at most two buckets are in memory besides the one that fills."""
    module, most = network(rank.rank), 0

    def count(_parameter: nn.Parameter) -> None:
        nonlocal most
        most = max(most, flats_in_memory(rank))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    model = rank.solution.GradientShardedDDP(module, bucket_size_mb=BUCKET_SIZE_MB)
    rank.record.clear()
    step(rank, model, 1)
    expect_left_alone(rank)
    if most > ON_THE_WIRE:
        raise Wrong(
            f"{most} of {LAYERS} flat tensors at once: wait for the last but one before another is "
            "made, and let go of its flat tensor"
        )


def different_orders(rank: Rank) -> None:
    """When each rank's gradients become ready in its own order, buckets are not mixed."""
    model = wrapped(rank)
    loss = branches_loss(1, lambda r: [0, 1, 2, 3, 4] if r == 0 else [4, 2, 0, 1, 3])
    loss(model, rank.rank).backward()
    model.finish_gradient_synchronization()
    hint = "do the buckets start in the order of self.units on every rank?"
    expect_unit_gradients(rank, model, network(0), loss, hint)


def later_steps(rank: Rank) -> None:
    """Three steps of an optimizer are those of one process."""
    question = "what is left over from the one before?"
    expect_steps_of_units(rank, wrapped(rank), network(0), branches_loss, step, question)


PROPERTIES = [
    gradients,
    traffic,
    early,
    what_stays,
    memory,
    different_orders,
    later_steps,
]
