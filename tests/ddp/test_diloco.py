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
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping import PrivacyEngine
from tests.support.beside import numbers
from tests.support.on_ranks import on_ranks
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


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainable(model)])


def are_equal(context: Context, values: Tensor) -> bool:
    """Returns whether two ranks have the same values."""
    everyone = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(everyone, values, group=context.group)
    return torch.equal(*everyone)


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


@on_ranks(2)
def test_the_last_round_may_be_shorter(context: Context) -> None:
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


@on_ranks(2)
def test_ranks_with_fewer_steps_join_in_the_end(context: Context) -> None:
    """Rank 1 leaves a step out, as a gradient scaler does for one rank alone; they meet later."""
    model, optimizer = wrapped(context, every=2)
    train(context, model, optimizer, range(1, 3 - context.rank))
    model.outer_step() if context.rank else None
    assert are_equal(context, flat(model))


@on_ranks(2)
def test_a_local_step_sends_nothing(context: Context) -> None:
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


@on_ranks(2)
def test_several_optimizers(context: Context) -> None:
    """Both count. One that takes fewer steps puts the outer step off until the next forward."""
    model, _ = wrapped(context, every=2)
    first, second = (model.make_optimizer(SGD, layer.parameters()) for layer in model.module[::4])
    start = flat(model)
    for step in range(1, 4):
        loss_of(model, step, context.rank).backward()
        model.finish_gradient_synchronization()
        first.step()
        second.step() if step == 2 else None
        assert max(model.counts) == (1 if step == 3 else step)
    model.outer_step()
    assert are_equal(context, flat(model))
    assert not torch.equal(flat(model), start)


@on_ranks(2)
def test_buffers_are_those_of_rank_0_after_an_outer_step(context: Context) -> None:
    """Rank 0's, from each outer step on, and a rank's own in between."""
    network = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    network.register_buffer("mark", torch.zeros(1))
    model = wrap("diloco", network, every=2, process_group=context.group)
    optimizer = model.make_optimizer(SGD)
    for step in range(1, 5):
        network.mark.fill_(context.rank + 1)
        x = numbers(4, 5, seed=step, rank=context.rank, like=model)
        model(x).square().sum().backward()
        assert network.mark == context.rank + 1
        model.finish_gradient_synchronization()
        optimizer.step()
        is_outer = step % 2 == 0
        assert network.mark == (1 if is_outer else context.rank + 1)
        assert are_equal(context, network[1].running_mean) is is_outer


@on_ranks(2)
def test_a_parameter_that_is_frozen_later_stays(context: Context) -> None:
    """Momentum alone does not move it."""
    model, optimizer = wrapped(context)
    train(context, model, optimizer, range(1, EVERY + 1))
    model.module[4].requires_grad_(False)
    before = model.module[4].weight.detach().clone()
    for p in model.module[4].parameters():
        p.grad = None
    model.find_unused_parameters = True
    train(context, model, optimizer, range(1, EVERY + 1))
    assert torch.equal(model.module[4].weight, before)


def saved(context: Context, make: Callable, steps: int) -> tuple[dict, dict]:
    model, optimizer = wrapped(context, make)
    train(context, model, optimizer, range(1, steps + 1))
    return copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))


def goes_on(context: Context, make: Callable, state: tuple[dict, dict], steps: range) -> None:
    """Rank 0's file on every rank: as if it had never been stopped."""
    model, optimizer = wrapped(context, make)
    weights, rest = state
    model.load_state_dict({f"module.{key}": value for key, value in weights.items()})
    optimizer.load_state_dict(rest)
    train(context, model, optimizer, steps)
    model.outer_step()
    expected = reference_loop(context.world_size, steps[-1], make)
    assert_reference(model, expected)


@pytest.mark.parametrize("make", [SGD, ADAMW])
@pytest.mark.parametrize("steps", [EVERY, EVERY + 2])
def test_a_run_goes_on_from_the_state_of_one_rank(cpu_ranks, make, steps):
    states = cpu_ranks.run(2, saved, make, steps)
    torch.testing.assert_close(states[0][1]["state"], states[1][1]["state"], rtol=0, atol=0)
    cpu_ranks.run(2, goes_on, make, states[0], range(steps + 1, 2 * EVERY + 2))


def on_other_ranks(context: Context, states: list[tuple[dict, dict]]) -> None:
    """Momentum and the place in the round are there, and what it saves is what was loaded."""
    model, optimizer = wrapped(context, ADAMW)
    weights, rest = states[0]
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(rest)
    mine = states[context.rank % len(states)][0]
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, mine[name])
    again = optimizer.state_dict()
    torch.testing.assert_close(again["state"], rest["state"], rtol=0, atol=0)
    for key in ("steps", "start", "momentum"):
        torch.testing.assert_close(again["diloco"][key], rest["diloco"][key], rtol=0, atol=0)
    train(context, model, optimizer, range(EVERY + 3, EVERY + 4))
    assert model.counts == [0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_loads_on_any_number_of_ranks(cpu_ranks, world_size):
    states = cpu_ranks.run(2, saved, ADAMW, EVERY + 2)
    cpu_ranks.run(world_size, on_other_ranks, states)


@on_ranks(2)
def test_states_of_plain_optimizers(context: Context) -> None:
    model, optimizer = wrapped(context, ADAMW)
    train(context, model, optimizer, range(1, EVERY + 1))
    state = optimizer.state_dict()
    plain = ADAMW(trainable(network()))
    plain.load_state_dict(state)
    optimizer.load_state_dict(plain.state_dict())
    assert all(not momentum.any() for momentum in model.momentum)
    wrong = copy.deepcopy(state)
    wrong["diloco"]["momentum"][1] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"another network: it has \[3\] for 0\.bias \[7\]"):
        optimizer.load_state_dict(wrong)


@on_ranks(3)
def test_options_that_are_refused_on_every_rank(context: Context) -> None:
    for options, message in [
        ({"every": 0}, r"every: 0 is not a number of steps, give 1 or more"),
        ({"every": 2.5}, r"every: 2\.5 is not"),
        ({"outer_lr": 0.0}, r"outer_lr: 0\.0 is not a positive"),
        ({"outer_momentum": 1.0}, r"outer_momentum: 1\.0 is not below 1"),
    ]:
        wrong_here = options if context.rank == 1 else {}
        for own, says in ((options, message), (wrong_here, "different options: .* on rank 1")):
            with pytest.raises(ValueError, match=says):
                wrap("diloco", network(), process_group=context.group, **own)
    with pytest.raises(ValueError, match=r"different options: every=3 on rank 0, every=4 on rank "):
        wrap("diloco", network(), process_group=context.group, every=3 + min(context.rank, 1))
    with pytest.raises(TypeError, match="diloco has no option reduce"):
        wrap("diloco", network(), process_group=context.group, reduce="sum")


@on_ranks(2)
def test_an_optimizer_that_is_not_counted_is_refused(context: Context) -> None:
    model = wrap("diloco", network(), process_group=context.group)
    optimizer = SGD(trainable(model))
    train(context, model, optimizer, range(1, 2))
    with pytest.raises(RuntimeError, match=r"0\.weight has changed.*by model\.make_optimizer\("):
        loss_of(model, 2, context.rank)


@on_ranks(2)
def test_private_training_is_refused_by_name(context: Context) -> None:
    model = wrap("diloco", nn.Linear(5, 2), process_group=context.group)
    with pytest.raises(ValueError, match=r"DilocoDDP.*diloco steps.*wrap\(\"ddp_bucketed\", net"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=model.make_optimizer(SGD),
            data_loader=torch.utils.data.DataLoader(list(torch.zeros(4, 5)), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


@on_ranks(1)
def test_a_rank_that_waits_in_vain_is_told_why(context: Context) -> None:
    """The backend's error has a note when other ranks do not come."""
    model, optimizer = wrapped(context, every=1)

    def timed_out(_mine: bool) -> bool:
        raise RuntimeError("Timed out")

    model.any_rank = timed_out
    with pytest.raises(RuntimeError, match="Timed out") as error:
        train(context, model, optimizer, range(1, 2))
    assert "take as many steps of its optimizer as the others" in error.value.__notes__[0]
