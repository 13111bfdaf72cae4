"""`diloco` against its reference loop, what it sends, its state, and what it refuses."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp import wrap
from dp_clipping import PrivacyEngine
from lm.rank_pool import Context
from tests.support.beside import numbers
from tests.support.recorder import recording

EVERY, OUTER_LR, OUTER_MOMENTUM = 3, 0.6, 0.8
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def network(seed: int = 0) -> nn.Module:
    """Float64, with a frozen layer and parameters of another type."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
    layers[2].requires_grad_(False)
    return layers.double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(numbers(4, 5, seed=step, rank=rank, like=model).double()).square().sum()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def reference_loop(
    world_size: int, steps: int, make: Callable, every: int = EVERY, outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
) -> list[Tensor]:  # fmt: skip
    """The algorithm of the paper, all workers in one process. A last round may be shorter."""
    start = network()
    momentum = outer_momentum
    outer = torch.optim.SGD(trainable(start), lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    workers = [copy.deepcopy(start) for _ in range(world_size)]
    optimizers = [make(trainable(worker)) for worker in workers]
    for step in range(1, steps + 1):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(worker, step, rank).backward()
            optimizer.step()
        if step % every == 0 or step == steps:
            for p, *theirs in zip(trainable(start), *map(trainable, workers), strict=True):
                p.grad = p.detach() - torch.stack([q.detach() for q in theirs]).mean(0)
            outer.step()
            for worker in workers:
                worker.load_state_dict(start.state_dict())
    return [p.detach() for p in trainable(start)]


def wrapped(context: Context, make: Callable = SGD, **options: Any) -> tuple[nn.Module, Any]:
    options = {"every": EVERY, "outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM, **options}
    options = {"process_group": context.group, "bucket_size_mb": 1e-4, **options}
    model = wrap("diloco", network(context.rank).to(context.device), **options)
    return model, model.make_optimizer(make)


def train(context: Context, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, context.rank).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


def assert_reference(model: nn.Module, expected: list[Tensor]) -> None:
    for p, q in zip(trainable(model), expected, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q, rtol=1e-12, atol=1e-12)


def two_rounds(context: Context, make: Callable, every: int, lr: float, momentum: float) -> None:
    options = {"every": every, "outer_lr": lr, "outer_momentum": momentum}
    model, optimizer = wrapped(context, make, **options)
    train(context, model, optimizer, range(1, 2 * every + 1))
    assert_reference(model, reference_loop(context.world_size, 2 * every, make, **options))


@pytest.mark.parametrize(("world_size", "make", "every", "lr", "momentum"), [
    (1, ADAMW, 3, 0.7, 0.9), (2, ADAMW, 3, 0.7, 0.9), (3, SGD, 2, 0.6, 0.8), (2, SGD, 1, 0.5, 0.5),
    (2, SGD, 4, 1.0, 0.0),
])  # fmt: skip
def test_two_rounds_are_those_of_the_reference_loop(
    cpu_ranks, world_size, make, every, lr, momentum
):
    cpu_ranks.run(world_size, two_rounds, make, every, lr, momentum)


@pytest.mark.gpu
def test_two_rounds_on_gpus(gpu_ranks):
    gpu_ranks.run(2, two_rounds, partial(ADAMW, fused=True), 3, 0.7, 0.9)


def shorter_last_round(context: Context) -> None:
    model, optimizer = wrapped(context)
    train(context, model, optimizer, range(1, 6))
    with pytest.warns(
        UserWarning, match=r"2 of the 3 steps of a round.*call model\.outer_step\(\)"
    ):
        model.state_dict()
    model.outer_step()
    expected = reference_loop(context.world_size, 5, SGD)
    assert_reference(model, expected)
    model.outer_step()  # does nothing
    assert_reference(model, expected)
    model.state_dict()


def test_the_last_round_may_be_shorter(cpu_ranks):
    cpu_ranks.run(2, shorter_last_round)


def fewer_steps_here(context: Context) -> None:
    """Rank 1 leaves a step out, as a gradient scaler does for one rank alone; they meet later."""
    model, optimizer = wrapped(context, every=2)
    train(context, model, optimizer, range(1, 3 - context.rank))
    model.outer_step() if context.rank else None
    values = torch.cat([p.detach().flatten() for p in trainable(model)])
    everyone = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(everyone, values, group=context.group)
    assert torch.equal(*everyone)


def test_ranks_with_fewer_steps_join_in_the_end(cpu_ranks):
    cpu_ranks.run(2, fewer_steps_here)


def what_is_sent(context: Context) -> None:
    """Nothing in a local step, with unused parameters too; each parameter once in an outer one."""
    with recording(context.group) as group:
        model, optimizer = wrapped(context, find_unused_parameters=True, process_group=group)
        nbytes = sum(p.nbytes for p in trainable(model))
        for step in range(1, 2 * EVERY + 1):
            group.events.clear()
            train(context, model, optimizer, range(step, step + 1))
            sent = [e for e in group.events if e.what.startswith("allreduce") and e.op == "AVG"]
            is_outer = step % EVERY == 0
            assert bool(group.events) is is_outer, group.events
            assert model.stats()["bytes"] == nbytes * is_outer
            assert model.stats()["collectives"] == len(sent) == len(model.launches())
            assert len(sent) == is_outer * len(model.schedule.buckets)
        assert len(model.schedule.buckets) > 1


def test_a_local_step_sends_nothing(cpu_ranks):
    cpu_ranks.run(2, what_is_sent)
