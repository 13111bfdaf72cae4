"""The properties of exercise 9, with buckets of 1 KiB."""

import torch
from torch import nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    Branches,
    Loss,
    branches_loss,
    expect_gradients,
    expect_overlap,
    mean_gradients,
    numbers,
    wrap,
)

WORLD_SIZES = (2,)
CAPACITY = 1 << 10
BUCKET_SIZE_MB = CAPACITY / (1 << 20)


class Stack(nn.Module):
    """Six layers of 256 and 32 bytes, one in float64, and two larger than a bucket."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.precise = nn.Linear(8, 8, dtype=torch.float64)
        self.wide = nn.Linear(8, 64, bias=False)
        self.narrow = nn.Linear(64, 8, bias=False)

    def forward(self, x):
        x = self.precise(self.layers(x).double()).float()
        return self.narrow(torch.tanh(self.wide(x)))


def loss_of(seed: int) -> Loss:
    return lambda model, rank: model(numbers(5, 8, seed=seed, rank=rank)).square().sum()


def wrapped(rank: Rank) -> nn.Module:
    return wrap(rank, "FlatDDP", Stack(rank.rank), bucket_size_mb=BUCKET_SIZE_MB)


def step(rank: Rank, model: nn.Module, seed: int) -> None:
    rank.record.clear()
    loss_of(seed)(model, rank.rank).backward()
    model.finish_gradient_synchronization()


def expect_mean(rank: Rank, model: nn.Module, seed: int, hint: str = "") -> None:
    expect_gradients(model, mean_gradients(Stack(0), [loss_of(seed)], rank.world_size), hint)


def gradients(rank: Rank) -> None:
    """After finish every gradient is the mean over the ranks."""
    model = wrapped(rank)
    step(rank, model, 1)
    expect_mean(rank, model, 1)


def fewer_launches(rank: Rank) -> None:
    """Gradients travel in buckets: fewer reductions than parameters, none above the capacity."""
    model = wrapped(rank)
    step(rank, model, 1)
    largest = max(p.nbytes for p in model.parameters())
    sizes = [e.nbytes for e in rank.record.calls("all_reduce")]
    count = len(list(model.parameters()))
    if not sizes or len(sizes) > count // 2 + 1:
        raise Wrong(f"{len(sizes)} reductions for {count} gradients")
    if max(sizes) > max(CAPACITY, largest):
        raise Wrong(f"a reduction of {max(sizes)} bytes, the capacity is {CAPACITY}")


def overlap(rank: Rank) -> None:
    """The first bucket starts before the last gradient is accumulated, and nothing waits."""
    model = wrapped(rank)
    step(rank, model, 1)
    expect_overlap(rank, "no bucket was started during backward")


def small_tail(rank: Rank) -> None:
    """The bucket that starts last is at most half of the capacity."""
    model = wrapped(rank)
    step(rank, model, 1)
    last = rank.record.calls("all_reduce")[-1].nbytes
    if last > CAPACITY // 2:
        raise Wrong(f"it has {last} bytes of {CAPACITY}, and nothing to hide behind")


def views(rank: Rank) -> None:
    """After finish every .grad is a view of what was reduced: nothing is copied back."""
    model = wrapped(rank)
    step(rank, model, 1)
    buffers = [(e.data_ptr, e.data_ptr + e.nbytes) for e in rank.record.calls("all_reduce")]
    for name, parameter in model.module.named_parameters():
        start = parameter.grad.data_ptr()
        if not any(a <= start and start + parameter.grad.nbytes <= b for a, b in buffers):
            raise Wrong(f"{name}.grad lies outside of the flat tensors: bind it to its slice")


def different_orders(rank: Rank) -> None:
    """When each rank's gradients become ready in its own order, buckets are not mixed."""
    model = rank.solution.FlatDDP(Branches(rank.rank), bucket_size_mb=100 / (1 << 20))
    loss = branches_loss(1, lambda r: [0, 1, 2] if r == 0 else [2, 0, 1])
    loss(model, rank.rank).backward()
    model.finish_gradient_synchronization()
    expected = mean_gradients(Branches(0), [loss], rank.world_size)
    expect_gradients(model, expected, "start buckets in the order of the plan on every rank")


def views_dropped(rank: Rank) -> None:
    """Gradients are right after zero_grad(), which removes the views."""
    model = wrapped(rank)
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        step(rank, model, seed)
    expect_mean(rank, model, 2, "the new .grad must be brought into the flat tensor and bound")


def views_kept(rank: Rank) -> None:
    """Gradients are right after zero_grad(set_to_none=False), which keeps the views."""
    model = wrapped(rank)
    for seed in range(4):
        model.zero_grad(set_to_none=seed == 2)
        step(rank, model, seed)
    expect_mean(rank, model, 3, "does something of an earlier step remain in the flat tensor?")


PROPERTIES = [
    gradients,
    fewer_launches,
    overlap,
    small_tail,
    views,
    different_orders,
    views_dropped,
    views_kept,
]
