"""Ranks whose settings differ after `make_private` take no step, on any backend."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.agreement import Agreement
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from tests.support.on_ranks import on_ranks
from tests.support.ranks import fsdp1, fsdp2, fsdp2_x_tensor, tensor
from tests.support.replicas import build, train


def step(run, change: Callable | None = None) -> None:
    """One step on the loader's next draw; `change` is called between backward and step."""
    run.optimizer.zero_grad()
    *batch, _ = next(iter(run.loader))
    inputs, targets = oracle.move(batch, device=run.device)
    run.criterion(run.model(inputs), targets).backward()
    if change is not None:
        change(run)
    run.optimizer.step()


def set_on(name: str, value) -> Callable:
    return lambda run: setattr(run.optimizer, name, value)


def other_policy(run) -> None:
    run.model.policy = run.model.policy.__class__(clipping_function="automatic", gamma=0.5)


def other_learning_rate_of_the_threshold(run) -> None:
    run.optimizer.adaptive_threshold.learning_rate = 0.3


def one_more_step(run) -> None:
    run.model.step_state.steps += 1


def evaluation_of_its_own(run) -> None:
    run.model.eval()
    list(run.loader)
    run.model.train()


def another_key(run) -> None:
    run.optimizer.resume(run.optimizer.steps, bytes(32))


def step_pre_hook(run) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: None)


DIFFERENT: dict[str, tuple[Callable, str]] = {
    "noise_multiplier": (set_on("noise_multiplier", 0.01), r"noise_multiplier \(0\.01 on rank 0,"),
    "max_grad_norm": (set_on("max_grad_norm", 0.1), r"max_grad_norm \(0\.1 on rank 0, 0\."),
    "expected_batch_size": (set_on("expected_batch_size", 8.0), r"expected_batch_size \(8\.0 on r"),
    "loss_reduction": (set_on("loss_reduction", "sum"), r"loss_reduction \(sum on rank 0, mean on"),
    "policy": (other_policy, r"clipping_function \(automatic on rank 0.*gamma \(0\.5 on rank 0"),
    "threshold": (other_learning_rate_of_the_threshold, r"learning_rate \(0\.3 on rank 0, 0\.2 on"),
    "steps": (one_more_step, r"steps \(\d on rank 0"),
    "batch": (evaluation_of_its_own, r"batch of the loader \(\d+ on rank 0, 2 on"),
    "key": (another_key, r"key fingerprint \("),
    "hook": (step_pre_hook, r"a step pre-hook of the optimizer \(True on rank 0, False on"),
}  # fmt: skip


def refused(run, context: Context, change: Callable, match: str) -> None:
    before = [p.detach().clone() for p in run.model.network.parameters()]
    history = list(run.engine.accountant.history)
    if context.rank == 0:
        change(run)
    with pytest.raises(RuntimeError, match=rf"is not taken: ranks differ in .*{match}"):
        step(run)
    local = [getattr(p, "_local_tensor", p) for p in run.model.network.parameters()]
    for now, then in zip(local, before, strict=True):
        assert torch.equal(now, getattr(then, "_local_tensor", then))
    assert run.engine.accountant.history == history
    assert all(p.grad is None for p in run.model.network.parameters())


@on_ranks(2)
def test_every_setting_is_compared(context: Context) -> None:
    for change, match in DIFFERENT.values():
        threshold = AdaptiveThreshold(0.7, expected_batch_size=4, count_std=6.0)
        run = build(context, "ddp_bucketed", adaptive_threshold=threshold, fused_step=True)
        train(run, 2)
        refused(run, context, change, match)


@pytest.mark.parametrize("variant", ["none", "ddp", "ddp_individual_v2", "torch_ddp"])
@on_ranks(2)
def test_a_step_is_taken_when_ranks_agree_again(context: Context, variant: str) -> None:
    """Each C_k, a change between backward and step, and a step after settings agree again."""
    run = build(context, variant, clipping="per_layer")
    train(run, 1)
    names = run.model.capture.group_names
    clip_norms = run.model.thresholds.clip_norms()

    def change(run) -> None:
        run.optimizer.max_grad_norm = [*clip_norms[:-1], 0.01]

    refused(run, context, change, rf"max_grad_norm of {names[-1]} \(0\.01 on rank 0, ")
    run.optimizer.max_grad_norm = clip_norms
    train(run, 1)
    # What changes behind the first backward is of the next step, with the noise of the agreed σ.
    step(run, set_on("noise_multiplier", 0.01) if context.rank == 0 else None)
    assert run.engine.accountant.history[-1][0] == 0.8
    refused(run, context, lambda _: None, r"noise_multiplier \(0\.01 on rank 0, 0\.8")
    run.optimizer.noise_multiplier = 0.9
    train(run, 1)
    assert run.engine.accountant.history[-1][0] == 0.9


def on_a_mesh(context: Context, shard: Callable) -> None:
    run = build(context, shard=partial(shard, context), name="transformer")
    train(run, 1)
    refused(run, context, *DIFFERENT["noise_multiplier"])
    run.optimizer.noise_multiplier = 0.8
    refused(run, context, *DIFFERENT["max_grad_norm"])


@pytest.mark.parametrize(
    ("ranks", "shard"),
    [
        (2, fsdp1),
        (2, fsdp2),
        (4, fsdp2_x_tensor),
        pytest.param(2, tensor, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_sharded_networks(cpu_ranks, ranks, shard):
    cpu_ranks.run(ranks, on_a_mesh, shard)


def early(context: Context) -> None:
    run = build(context, "ddp_bucketed")
    run.optimizer.fixed_settings.agreement = Agreement(context.group, early=True)
    train(run, 2, microbatch=2)
    again = Agreement(context.group, early=True)
    assert again._group is run.optimizer.fixed_settings.agreement._group
    run.optimizer.zero_grad()
    for _ in range(2):  # a step that is dropped and begun again exchanges once
        *batch, _ = next(iter(run.loader))
        run.criterion(run.model(batch[0]), batch[1]).backward()
        run.optimizer.zero_grad()
    train(run, 1)
    refused(run, context, *DIFFERENT["max_grad_norm"])
    run.optimizer.max_grad_norm = 0.7
    # What changes behind the first backward is of the next step, with the noise of the agreed σ.
    step(run, set_on("noise_multiplier", 0.01) if context.rank == 0 else None)
    assert run.engine.accountant.history[-1][0] == 0.8
    refused(run, context, lambda _: None, r"noise_multiplier \(0\.01 on rank 0, 0\.8")


def test_an_exchange_that_begins_with_the_first_backward(cpu_ranks):
    cpu_ranks.run(4, early)


@on_ranks(2)
def test_a_seed_is_given_on_all_ranks_or_none(context: Context) -> None:
    with pytest.raises(ValueError, match="ranks differ in noise_generator is given"):
        build(context, "ddp", seed=(5, None)[context.rank])


@on_ranks(2)
def test_other_units_on_each_rank_are_refused(context: Context) -> None:
    """A user would be drawn on both ranks: hash(user) differs by process, for example."""
    shifted = [(i + context.rank) % 24 // 2 for i in range(24)]
    with pytest.raises(ValueError, match=r"^ranks differ in unit_ids \(\w+ on rank 0, \w+ on rank"):
        build(context, "ddp_bucketed", examples_per_unit=2, unit_ids=shifted)


NAN = float("nan")


def first_step(context: Context, variant: str, samples: tuple, early: bool) -> tuple[str, int]:
    """The error of a first step on these samples of each rank, and how many steps are counted."""
    run = build(context, variant, poisson_sampling=False, grad_sample_mode="bookkeeping")
    if early:
        run.optimizer.fixed_settings.agreement = Agreement(context.group, early=True)
    mine = torch.tensor(samples[context.rank], dtype=torch.float32)
    labels = torch.zeros(len(mine), dtype=torch.long)
    run.criterion(run.model(mine[:, None].expand(-1, 6)), labels).backward()
    try:
        run.optimizer.step()
    except RuntimeError as error:
        return str(error)[:21], len(run.engine.accountant)
    return "", len(run.engine.accountant)


@pytest.mark.parametrize(
    ("samples", "is_noise_alone"),
    [
        (([NAN], [NAN, NAN]), True),
        (([NAN], []), True),
        (([NAN], [1.0, NAN]), False),
        (([], []), False),
    ],
    ids=["none", "none-empty", "one", "empty"],
)
@pytest.mark.parametrize(("variant", "early"), [("ddp_bucketed", True), ("fsdp", False)])
def test_all_ranks_refuse_a_first_step_of_noise_alone(
    cpu_ranks, variant, early, samples, is_noise_alone
):
    expected = ("no sample of the firs", 0) if is_noise_alone else ("", 1)
    found = cpu_ranks.run(4, first_step, variant, (*samples, [], []), early)
    assert found == [expected] * 4
