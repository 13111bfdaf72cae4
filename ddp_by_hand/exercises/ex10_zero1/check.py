"""The properties of exercise 10. The network has 71 numbers, which neither 2 nor 3 divides."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import difference, same
from ddp_by_hand.exercises.sliced import (
    Reference,
    expect_slice,
    flat_of,
    network_loss,
    on_all_ranks,
)
from ddp_by_hand.exercises.transfer import GATHERS, SCATTERS

WORLD_SIZES = (2, 3)


class Small(nn.Module):
    """Two layers of 71 numbers, and a frozen one."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 2, bias=False)
        self.frozen = nn.Linear(2, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.frozen(self.second(torch.tanh(self.first(x))))


LOSS = network_loss(5)


def trained(network: nn.Module) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.requires_grad]


def alone(rank: Rank, cls: type = torch.optim.Adam) -> Reference:
    return Reference(rank, Small(0), cls, lr=0.1)


def wrapped(rank: Rank) -> nn.Module:
    model = rank.solution.StateShardedDDP(Small(rank.rank))
    rank.record.clear()
    return model


def backward(rank: Rank, model: nn.Module, seed: int) -> None:
    LOSS(seed)(model, rank.rank).backward()
    model.finish_gradient_synchronization()


def parts(rank: Rank, model: nn.Module) -> tuple[int, int, int]:
    """Returns where this rank's slice begins and ends, and the count without padding."""
    n = model.own.numel()
    return rank.rank * n, (rank.rank + 1) * n, flat_of(trained(model.module)).numel()


def layout(rank: Rank) -> None:
    """All parameters lie in one flat tensor whose length the ranks divide, and own is a slice."""
    model = wrapped(rank)
    flat, own, count = model.flat, model.own, alone(rank).values().numel()
    if flat.numel() < count:
        raise Wrong(
            f"flat has {flat.numel()} numbers for {count}: the last parameters would never be "
            f"stepped; round the length up, and not down, to a multiple of {rank.world_size}"
        )
    if flat.numel() % rank.world_size or flat.numel() >= count + rank.world_size:
        raise Wrong(
            f"flat has {flat.numel()} numbers; the next multiple of {rank.world_size} after "
            f"{count} is {-(-count // rank.world_size) * rank.world_size}"
        )
    n = flat.numel() // rank.world_size
    here = flat.data_ptr() + rank.rank * n * flat.element_size()
    if own.numel() != n or own.data_ptr() != here:
        raise Wrong(f"self.own should be flat[{rank.rank * n}:{(rank.rank + 1) * n}], a view of it")
    if not (own.requires_grad and own.is_leaf):
        raise Wrong("self.own is no leaf that requires a gradient: detach() and requires_grad_()")
    place = flat.data_ptr()
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            if parameter.data_ptr() != place:
                raise Wrong(f"{name} is no view of its place in flat: assign the view to its .data")
            place += parameter.nbytes
    if not same(flat[:count], alone(rank).values()):
        raise Wrong(difference("flat", flat[:count], alone(rank).values()))


def gradients(rank: Rank) -> None:
    """After finish self.own.grad is this rank's slice of the mean."""
    model = wrapped(rank)
    backward(rank, model, 1)
    expect_slice(rank, model.own, trained(model.module), Small(0), LOSS(1))


def one_reduction(rank: Rank) -> None:
    """Gradients are reduce-scattered, once: no rank gets sums that it does not step."""
    model = wrapped(rank)
    backward(rank, model, 1)
    reduced = rank.record.calls("all_reduce", "reduce", "all_gather", *GATHERS)
    if reduced:
        raise Wrong(
            f"{reduced[0].what} of {reduced[0].numel} numbers in finish: other ranks' slices are "
            "of no use here, and the gather of parameters comes on top; use reduce_scatter"
        )
    if (count := len(rank.record.calls("reduce_scatter", *SCATTERS))) != 1:
        raise Wrong(f"{count} reduce-scatters: put all gradients into one flat tensor")


def state(rank: Rank) -> None:
    """The optimizer has state for this rank's slice, and for nothing else."""
    model = wrapped(rank)
    optimizer = model.make_optimizer(torch.optim.Adam, lr=0.1)
    backward(rank, model, 1)
    optimizer.step()
    begin, end, count = parts(rank, model)
    kept = sum(values["exp_avg"].numel() for values in optimizer.state.values())
    stepped = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    if max(kept, stepped) != end - begin:
        raise Wrong(
            f"rank {rank.rank} keeps state for {max(kept, stepped)} of {count} numbers, and owns "
            f"{end - begin}: no memory is saved; build the optimizer over [self.own]"
        )


def first_step(rank: Rank) -> None:
    """After a step every rank has the values that one process would have."""
    model, reference = wrapped(rank), alone(rank)
    old = reference.values()
    optimizer = model.make_optimizer(torch.optim.Adam, lr=0.1)
    backward(rank, model, 1)
    rank.record.clear()
    optimizer.step()
    reference.step(LOSS(1))
    expect_values(rank, model, reference, old)


def expect_values(rank: Rank, model: nn.Module, reference: Reference, old: Tensor) -> None:
    begin, end, _ = parts(rank, model)
    found, expected = flat_of(trained(model.module)), reference.values()
    if same(found, expected):
        return
    if same(found, old):
        raise Wrong("no parameter has changed: does the optimizer step self.own, a view of flat?")
    others = [*range(begin), *range(end, len(old))]
    if same(found[begin:end], expected[begin:end]) and same(found[others], old[others]):
        why = "replicas drift apart; gather the parameters after the step"
        if rank.record.calls("all_gather", *GATHERS):
            why = "the gather ran before the slices were stepped; use a hook after the step"
        raise Wrong(f"rank {rank.rank} has its own slice's new values, and all others' old: {why}")
    raise Wrong(difference("the parameters, flat,", found, expected))


def later_steps(rank: Rank) -> None:
    """Three more steps are those of one process."""
    model, reference = wrapped(rank), alone(rank, torch.optim.SGD)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    for seed in range(4):
        old = reference.values()
        optimizer.zero_grad()
        backward(rank, model, seed)
        left = [n for n, p in model.module.named_parameters() if p.grad is not None]
        optimizer.step()
        reference.step(LOSS(seed))
        on_all_ranks(rank, partial(expect_step, rank, model, reference, old, seed, left))


def expect_step(
    rank: Rank, model: nn.Module, reference: Reference, old: Tensor, seed: int, left: list[str]
) -> None:
    if left and not same(flat_of(trained(model.module)), reference.values()):
        raise Wrong(
            f"wrong from step {seed + 1}: {left[0]}.grad is left after finish, the optimizer's "
            "zero_grad() does not know it, and the next backward adds to it; set it to None"
        )
    expect_values(rank, model, reference, old)


def unused(rank: Rank) -> None:
    """A parameter without a gradient counts as zeros."""
    model = wrapped(rank)

    def loss(model: nn.Module, of: int) -> Tensor:
        return getattr(model, "module", model).scale.sum() if of == 0 else LOSS(1)(model, of)

    loss(model, rank.rank).backward()
    model.finish_gradient_synchronization()
    expect_slice(rank, model.own, trained(model.module), Small(0), loss)


def checkpoint(rank: Rank) -> None:
    """The saved state is whole, without padding, and the same on every rank."""
    model, reference = wrapped(rank), alone(rank)
    optimizer = model.make_optimizer(torch.optim.Adam, lr=0.1)
    for seed in range(2):
        backward(rank, model, seed)
        optimizer.step()
        reference.step(LOSS(seed))
    whole = model.whole_state(optimizer)
    for key in ("exp_avg", "exp_avg_sq"):
        found, expected = whole[key], reference.state(key)
        if found.numel() == model.flat.numel() != expected.numel():
            raise Wrong(
                f"{key} has {found.numel()} numbers, the padding for {rank.world_size} ranks among "
                f"them: save {expected.numel()}, or it will not fit another number of ranks"
            )
        if found.numel() == model.own.numel():
            raise Wrong(f"{key} is this rank's slice only, and rank 0's file would lack the others")
        if not same(found, expected):
            raise Wrong(difference(key, found, expected))
    if float(whole["step"]) != 2:
        raise Wrong(f"step is {whole['step']} after two steps: every rank has the same, keep it")


def resume(rank: Rank) -> None:
    """A state that was saved elsewhere goes on where it ended."""
    model, reference = wrapped(rank), alone(rank)
    for seed in range(2):
        reference.step(LOSS(seed))
    saved = {key: reference.state(key) for key in ("exp_avg", "exp_avg_sq")}
    saved["step"] = torch.tensor(2.0)
    optimizer = model.make_optimizer(torch.optim.Adam, lr=0.1)
    model.load_whole_state(optimizer, copy.deepcopy(saved))
    on_all_ranks(rank, partial(expect_loaded, rank, model, optimizer, saved["exp_avg"]))
    old = reference.values()
    model.flat[: len(old)].copy_(old)
    backward(rank, model, 2)
    optimizer.step()
    reference.step(LOSS(2))
    expect_values(rank, model, reference, old)


def expect_loaded(
    rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, whole: Tensor
) -> None:
    begin, end, count = parts(rank, model)
    values = optimizer.state.get(model.own)
    if not values:
        raise Wrong("the optimizer has no state for self.own: fill optimizer.state[self.own]")
    expected = whole[begin:end]
    found = values["exp_avg"].flatten()
    if found.numel() != end - begin:
        raise Wrong(f"exp_avg has {found.numel()} numbers for a slice of {end - begin}")
    if not same(found[: len(expected)], expected):
        for other in range(rank.world_size):
            theirs = whole[other * (end - begin) : (other + 1) * (end - begin)]
            if same(found[: len(theirs)], theirs):
                raise Wrong(
                    f"rank {rank.rank} has the state of rank {other}'s slice: take that of "
                    f"numbers {begin} to {min(end, count)}"
                )
        raise Wrong(difference("exp_avg", found[: len(expected)], expected))


PROPERTIES = [
    layout,
    gradients,
    one_reduction,
    state,
    first_step,
    later_steps,
    unused,
    checkpoint,
    resume,
]
