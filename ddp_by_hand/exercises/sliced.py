"""Shared by the checks of exercises 10 to 12: what a rank's slice of gradients should be."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import (
    Gradients,
    Loss,
    difference,
    local_gradients,
    mean_gradients,
    numbers,
    same,
    scaled,
)
from ddp_by_hand.exercises.transfer import SCATTERS, has_memory


def network_loss(width: int) -> Callable[[int], Loss]:
    """Returns `loss(seed)`, of a network that takes vectors of `width` numbers."""
    return lambda seed: (
        lambda model, rank: model(numbers(4, width, seed=seed, rank=rank)).square().sum()
    )


def slice_of(gradients: list[Tensor | None], like: list[nn.Parameter], rank: int, n: int) -> Tensor:
    """Returns a rank's slice of n numbers of flattened gradients; what is missing is zero."""
    flat = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, like, strict=True)]
    flat = torch.cat([g.detach().flatten() for g in flat])
    return flat[rank * n : (rank + 1) * n]  # shorter where the padding begins


def expect_left_alone(rank: Rank) -> None:
    """Raises `Wrong` if a tensor was freed or written to while a collective used it."""
    for event in rank.record.events:
        if event.what in ("freed", "overwritten"):
            raise Wrong(
                f"a tensor of {event.detail} numbers was {event.what} while a collective was still "
                "at work on it: handle.wait() first"
            )


def expect_slice(
    rank: Rank,
    own: Tensor,
    trained: list[nn.Parameter],
    network: nn.Module,
    loss: Loss,
    names: list[str] | None = None,
) -> None:
    """Raises `Wrong` unless `own.grad` is this rank's slice of the mean gradients.

    `network` is an equal one without a wrapper, `names` are those of `trained`, default all.
    """
    expect_left_alone(rank)
    if own.grad is None:
        raise Wrong("the own slice has no gradient after finish: set own.grad")
    if own.grad.shape != own.shape:
        raise Wrong(f"own.grad has {own.grad.numel()} numbers, and own {own.numel()}")
    names = names or [name for name, p in network.named_parameters() if p.requires_grad]
    n, world_size = own.numel(), rank.world_size

    def sliced(gradients: Gradients, of: int) -> Tensor:
        return slice_of([gradients[name] for name in names], trained, of, n)

    mean = mean_gradients(network, [loss], world_size)
    expected = sliced(mean, rank.rank)
    found = own.grad[: len(expected)]
    if same(found, expected):
        return
    mistakes = {
        "is NaN: the reduction was not waited for": torch.full_like(found, torch.nan),
        "is the sum over the ranks: divide it": sliced(scaled(mean, world_size), rank.rank),
        "was divided by the number of ranks twice": sliced(scaled(mean, 1 / world_size), rank.rank),
        "is this rank's own: reduce it": sliced(
            local_gradients(network, [loss], rank.rank), rank.rank
        ),
    }
    for other in range(world_size):
        mistakes[f"is the slice of rank {other}"] = sliced(mean, other)
    for sentence, values in mistakes.items():
        count = min(len(found), len(values))  # the last rank's slice ends with the padding
        if torch.allclose(found[:count], values[:count], 1e-4, 1e-5, equal_nan=True):
            raise Wrong(f"own.grad on rank {rank.rank} {sentence}")
    raise Wrong(difference(f"own.grad on rank {rank.rank}", found, expected))


def expect_unit_gradients(
    rank: Rank, model: nn.Module, network: nn.Module, loss: Loss, hint: str = ""
) -> None:
    """Raises `Wrong` for the first unit whose slice is wrong; `hint` is added."""
    for number, unit in enumerate(model.units):
        try:
            names = names_of(model, unit.trained)
            expect_slice(rank, unit.own, unit.trained, network, loss, names)
        except Wrong as wrong:
            raise Wrong(f"unit {number}: {wrong}" + (f"; {hint}" if hint else "")) from None


def expect_slices_only(rank: Rank, model: nn.Module) -> None:
    """Raises `Wrong` if more of the gradients than this rank's slices is in memory."""
    for name, parameter in model.module.named_parameters():
        if parameter.grad is not None:
            raise Wrong(f"{name}.grad is still there: set it to None when it is in the flat tensor")
    for unit in model.units:
        held = unit.own.grad.untyped_storage().nbytes()
        if held > unit.own.nbytes:
            raise Wrong(
                f"own.grad of {names_of(model, unit.trained)[0]} is a view of {held} bytes, all of "
                f"the flat tensor: receive {unit.own.nbytes} bytes in a tensor of their own"
            )
    if count := flats_in_memory(rank):
        raise Wrong(f"{count} flat tensors are in memory after finish: what refers to them?")


def flats_in_memory(rank: Rank) -> int:
    """Returns how many of the flat tensors that were reduced are still allocated."""
    return len({e.storage.cdata for e in rank.record.calls(*SCATTERS) if has_memory(e.storage)})


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    known = {parameter: name for name, parameter in model.module.named_parameters()}
    return [known[parameter] for parameter in parameters]


class Reference:
    """An ordinary network that an ordinary optimizer trains on the data of all ranks."""

    def __init__(self, rank: Rank, network: nn.Module, cls: type, **options):
        self.network, self.world_size = network, rank.world_size
        self.trained = [p for p in network.parameters() if p.requires_grad]
        self.optimizer = cls(self.trained, **options)

    def step(self, loss: Loss) -> None:
        means = mean_gradients(self.network, [loss], self.world_size)
        for name, parameter in self.network.named_parameters():
            parameter.grad = means[name]
        self.optimizer.step()

    def values(self) -> Tensor:
        return flat_of(self.trained)

    def state(self, key: str) -> Tensor:
        return flat_of([self.optimizer.state[p][key] for p in self.trained])


def flat_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def on_all_ranks(rank: Rank, check: Callable[[], None]) -> None:
    """Raises `Wrong` on every rank if `check` raises it on any, so none waits for another."""
    why = ""
    try:
        check()
    except Wrong as wrong:
        why = str(wrong)
    everyone = [why] * rank.world_size
    dist.all_gather_object(everyone, why)
    if any(everyone):
        raise Wrong(next(filter(None, everyone)))


def expect_steps_of_units(
    rank: Rank, model: nn.Module, network: nn.Module, loss: Callable[[int], Loss],
    step: Callable[[Rank, nn.Module, int], object], question: str,
) -> None:  # fmt: skip
    """Raises `Wrong` unless three steps of an optimizer are those of one process.

    Args:
        network: an equal one, for the process alone.
        loss: the loss of each seed.
        step: runs forward, backward and finish of `model` with a seed.
        question: hint at what may be wrong.
    """
    reference = Reference(rank, network, torch.optim.SGD, lr=0.1)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        step(rank, model, seed)
        optimizer.step()
        reference.step(loss(seed))
        hint = f"wrong in step {seed + 1}: {question}"
        on_all_ranks(rank, partial(expect_values_of_units, rank, model, reference, hint))


def expect_values_of_units(rank: Rank, model: nn.Module, reference: Reference, hint: str) -> None:
    """Raises `Wrong` unless each unit's own slice has the values of the reference."""
    values = dict(reference.network.named_parameters())
    for number, unit in enumerate(model.units):
        own = unit.own.detach()
        whole = [values[name] for name in names_of(model, unit.trained)]
        expected = slice_of(whole, unit.trained, rank.rank, own.numel())
        if not same(own[: len(expected)], expected):
            name = f"own of unit {number}"
            raise Wrong(f"{difference(name, own[: len(expected)], expected)}; {hint}")
