"""Shared by the checks: small networks, expected gradients, and messages about differences.

The expected gradients need no communication: each rank builds the network of rank 0 again and
computes the gradients of every rank's data.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.record import Event

Gradients = dict[str, Tensor | None]
Loss = Callable[[nn.Module, int], Tensor]
"""`loss(model, rank)`: what a rank's own data make of a model."""


class Branches(nn.Module):
    """A common layer, then the branches in the order that is passed to forward.

    All branches have the same shape, so a gradient added to the wrong one raises no error.
    """

    def __init__(self, seed: int, count: int = 3, width: int = 4):
        super().__init__()
        torch.manual_seed(seed)
        self.common = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor, which: list[int] | None = None) -> Tensor:
        x = self.common(x)
        for i in range(len(self.branches)) if which is None else which:
            x = torch.tanh(self.branches[i](x))
        return x


def branches_loss(seed: int, which: Callable[[int], list[int]] | None = None) -> Loss:
    """Returns a loss; each rank takes the branches `which(rank)`, by default all in order."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        taken = which(rank) if which else None
        return model(numbers(5, 4, seed=seed, rank=rank), taken).square().sum()

    return loss


def wrap(rank: Rank, name: str, network: nn.Module | None = None, **options) -> nn.Module:
    """Returns a network in the solution's class of that name; default: `Branches`.

    The record begins behind it, and will say when each gradient has been accumulated.
    """
    network = Branches(seed=rank.rank) if network is None else network
    mark_gradients(rank, network)
    model = getattr(rank.solution, name)(network, **options)
    rank.record.clear()
    return model


def step(rank: Rank, model: nn.Module, seed: int, which=None) -> None:
    """Runs a step of `branches_loss` up to its finish."""
    branches_loss(seed, which)(model, rank.rank).backward()
    model.finish_gradient_synchronization()


def numbers(*shape: int, seed: int, rank: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def gradients_of(module: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def local_gradients(module: nn.Module, losses: list[Loss], rank: int) -> Gradients:
    """Returns the gradients of the sum of `losses` on one rank, of a copy without hooks."""
    alone = copy.deepcopy(module)
    for loss in losses:
        loss(alone, rank).backward()
    return gradients_of(alone)


def mean_gradients(module: nn.Module, losses: list[Loss], world_size: int) -> Gradients:
    """Returns means over ranks; a rank without a gradient adds zero, none at all gives None."""
    per_rank = [local_gradients(module, losses, r) for r in range(world_size)]
    return {name: mean([g[name] for g in per_rank]) for name in per_rank[0]}


def mean(gradients: list[Tensor | None]) -> Tensor | None:
    there = [g for g in gradients if g is not None]
    return torch.stack(there).sum(0) / len(gradients) if there else None


def scaled(gradients: Gradients, factor: float) -> Gradients:
    return {name: None if g is None else g * factor for name, g in gradients.items()}


def same(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return actual.shape == expected.shape and torch.allclose(actual, expected, 1e-4, 1e-5)


def expect_gradients(
    model: nn.Module,
    expected: Gradients,
    hint: str = "",
    mistakes: dict[str, Gradients] | None = None,
) -> None:
    """Raises `Wrong` for the first gradient that differs.

    `mistakes` maps what to say to the gradients for which to say it; `hint` is for all others.
    """
    for name, parameter in model.module.named_parameters():
        if same(parameter.grad, expected[name]):
            continue
        for sentence, gradients in (mistakes or {}).items():
            if same(parameter.grad, gradients[name]):
                hint = sentence
        seen = difference(f"{name}.grad", parameter.grad, expected[name])
        raise Wrong(f"{seen}; {hint}" if hint else seen)


def expect_parameters_left_alone(rank: Rank, module: nn.Module) -> None:
    """Raises `Wrong` if a parameter was reduced; the mean of equal parameters would not show it."""
    names = {p.data_ptr(): name for name, p in module.named_parameters()}
    for event in rank.record.calls("all_reduce"):
        if event.data_ptr in names:
            raise Wrong(f"{names[event.data_ptr]} itself was reduced, and not its .grad")


def difference(name: str, actual: Tensor | None, expected: Tensor | None) -> str:
    """Describes the first number in which two tensors differ, or their different shapes."""
    if actual is None or expected is None or actual.shape != expected.shape:
        return f"{name} is {show(actual)} and should be {show(expected)}"
    differs = ~torch.isclose(actual.double(), expected.double(), 1e-4, 1e-5)
    k = differs.flatten().nonzero()[0].item()
    found, wanted = (t.flatten()[k].item() for t in (actual, expected))
    return f"number {k} of {name} is {found:.4g} and should be {wanted:.4g}"


def show(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    head = ", ".join(f"{v:.3g}" for v in tensor.detach().flatten()[:3].tolist())
    return f"[{head}{', ...' if tensor.numel() > 3 else ''}]"


def mark_gradients(rank: Rank, module: nn.Module) -> None:
    """Writes into the record when each gradient has been accumulated, before any other hook."""
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: rank.record.mark("gradient", name)
        )


def during_backward(rank: Rank) -> list[Event]:
    """Returns the events up to the last gradient."""
    events = rank.record.events
    last = max((i for i, e in enumerate(events) if e.what == "gradient"), default=-1)
    return events[: max(last, 0)]


def expect_overlap(rank: Rank, none: str) -> None:
    """Raises `Wrong` if backward has started no all-reduce (`none` says so), or has waited."""
    events = [e for e in during_backward(rank) if e.what in ("all_reduce", "wait")]
    if not events:
        raise Wrong(none)
    if any(e.what == "wait" or not e.asynchronous for e in events):
        raise Wrong("something waits during backward: use async_op=True and wait in finish")


def launch_names(rank: Rank, module: nn.Module) -> list[str]:
    """Returns whose gradient each all-reduce was for; call it while the gradients are there."""
    names = {p.grad.data_ptr(): n for n, p in module.named_parameters() if p.grad is not None}
    return [names.get(e.data_ptr, f"{e.numel} numbers") for e in rank.record.calls("all_reduce")]
