"""Clipped sums on every data-parallel variant, beside one process that has the whole batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.rank_pool import Context
from tests.dp_clipping.conftest import assert_close, gradients_of, private, private_loss
from tests.support import zoo
from tests.support.beside import small_buckets
from tests.support.on_ranks import on_ranks
from tests.support.recorder import recording
from tests.support.replicas import ALL, BUCKET_MB, SPLITS, SYNCHRONISING, Beside, build, part, train

FLOAT32_BYTES = 4


def short(variant: str) -> str:
    return variant.rpartition(":")[2]


def variants(*fast: str) -> pytest.MarkDecorator:
    """Runs those whose hooks differ most, and every other one as a slow test."""
    return pytest.mark.parametrize(
        "variant",
        [
            pytest.param(name, id=short(name), marks=[pytest.mark.slow] * (short(name) not in fast))
            for name in SYNCHRONISING
        ],
    )


def fails_in_the_norm_pass(pair: Beside, rank: int) -> None:
    def loss(outputs, targets):
        losses = pair.per_sample_loss(outputs, targets)
        losses.register_hook(raise_arithmetic_error)
        return losses

    with pytest.raises(ArithmeticError):
        private_loss(pair.model, pair.batch, loss).backward()


def fails_between_two_sums(pair: Beside, rank: int) -> None:
    """Not between the same two on each rank."""
    accumulate, left = pair.model.gradient_buffer.accumulate, [3 + 4 * rank]

    def receive_some(sums):
        for one in sums:
            left[0] -= 1
            if left[0] < 0:
                raise_arithmetic_error(one)
            accumulate([one])

    pair.model.gradient_buffer.accumulate = receive_some
    with pytest.raises(ArithmeticError):
        pair.backward(ALL)
    del pair.model.gradient_buffer.accumulate


def raise_arithmetic_error(_):
    raise ArithmeticError("failed on purpose")


FAILURES = [(fails_in_the_norm_pass, True), (fails_between_two_sums, False)]
MORE_FAILURES = [(fails_in_the_norm_pass, False), (fails_between_two_sums, True)]


def failed(context: Context, variant: str, fail: Callable, zeroes: bool) -> None:
    """In the first step and later, zeroed and not; then a step is right."""
    pair = Beside(context, variant, mode="ghost" if zeroes else "bookkeeping")
    for sizes in SPLITS[context.world_size][:2]:
        fail(pair, context.rank)
        if zeroes:
            pair.model.clear_gradients()
        pair.check_step(sizes)


@pytest.mark.parametrize(
    ("fail", "zeroes"),
    [*FAILURES, *(pytest.param(*f, marks=pytest.mark.slow) for f in MORE_FAILURES)],
)
@variants("ddp_bucketed", "CpuCopyEngineDDP", "torch_ddp")
def test_a_step_after_a_failed_backward(cpu_ranks, variant, fail, zeroes):
    cpu_ranks.run(2, failed, variant, fail, zeroes)


@variants("ddp_bucketed", "CpuCopyEngineDDP", "torch_ddp")
@on_ranks(2)
def test_parameters_that_were_not_used_contribute_zero(context: Context, variant: str) -> None:
    """By nobody, whatever `find_unused_parameters` says, and then by some ranks only."""
    Beside(context, variant, name="unused").check_step((1, 3))
    Beside(context, variant, name="unused", find_unused_parameters=True).check_step((1, 3))
    networks = [branching(rank % 2 == 0) for rank in range(context.world_size)]
    module = wrap(
        variant, networks[context.rank], process_group=context.group, **small_buckets(variant)
    )
    model = private(module, max_grad_norm=1e6)
    batch = zoo.classes(3, 6)
    for _ in range(2):
        private_loss(model, batch, zoo.cross_entropy).backward()
        model.module.finish_gradient_synchronization()
        total: dict = {}
        for takes_it in (True, False):
            gradients = oracle.per_sample_gradients(branching(takes_it), batch, zoo.cross_entropy)
            for name, g in gradients.items():
                total[name] = total.get(name, 0) + g.sum(0)
        assert_close(gradients_of(model), total, 1e-5)
        model.clear_gradients()


def branching(takes_it: bool) -> nn.Module:
    def forward(net, x):
        return net.head(net.sometimes(x) if takes_it else x)

    return zoo.seeded(lambda: zoo.Net(forward, sometimes=nn.Linear(6, 6), head=nn.Linear(6, 3)))


def noise_of_unused(context: Context) -> np.ndarray:
    run = build(context, name="unused", batch_size=8, noise_multiplier=2.0)
    train(run, 1)
    return torch.cat([p.grad.flatten() for p in run.model.network.skipped.parameters()]).numpy()


def test_a_parameter_that_nobody_used_gets_noise(cpu_ranks):
    one, other = cpu_ranks.run(2, noise_of_unused)
    assert one.tobytes() == other.tobytes()
    assert 0.6 < one.std() / (2.0 * 0.7 / 8) < 1.4


@pytest.mark.parametrize(("variant", "mode"), [
    ("ddp", "bookkeeping"), ("ddp_individual", "bookkeeping"),
    ("ddp_bucketed", "ghost"), ("ddp_individual_v2", "per_sample"),
])  # fmt: skip
@on_ranks(2)
def test_sums_leave_while_others_are_computed(context: Context, variant: str, mode: str) -> None:
    """Sums of bfloat16 parameters: when they leave, in which order, in which type."""
    with recording(context.group) as group:
        replica = Context(context.rank, context.world_size, context.device, group)
        pair = Beside(replica, variant, mode, dtype=torch.bfloat16, tolerance=3e-2)
        model, accumulate = pair.model, pair.model.gradient_buffer.accumulate

        def marked(sums):
            for record, total in sums:
                group.mark("sum", record.name)
                accumulate([(record, total)])

        model.gradient_buffer.accumulate = marked
        numel = sum(p.numel() for p in model.capture.parameters)
        for step in range(3):
            group.events.clear()
            pair.backward(part((3, 1), context.rank))
            group.mark("finish")
            pair.finish()
            calls = group.gradient_collectives()
            assert {(c.dtype, c.op) for c in calls} == {("torch.float32", "SUM")}
            assert sum(c.numel for c in calls) == numel
            assert model.module.stats()["bytes"] == numel * FLOAT32_BYTES
            pair.check_sums()
            if step:
                check_stream(group.events, model, variant)
            model.clear_gradients()


def check_stream(events: list, model, variant: str) -> None:
    sums = [i for i, e in enumerate(events) if e.what == "sum"]
    first = next(i for i, e in enumerate(events) if e.what.startswith("allreduce"))
    in_order = [events[i].detail for i in sums]
    # Backwards through the network (autograd visits what scales a norm last), buckets likewise.
    matrices = [name for name, p in model.network.named_parameters() if p.dim() > 1]
    assert [name for name in in_order if name in matrices] == matrices[::-1]
    assert [n for launch in model.module.launches() for n in launch.names] == in_order
    if variant == "ddp":
        assert first > next(i for i, e in enumerate(events) if e.what == "finish")
    else:
        assert first < sums[-2], "under way before the last sum is begun"
        assert "wait" not in [e.what for e in events[: sums[-1]]]


@variants("ddp_individual_v2", "torch_ddp_tuned")
@on_ranks(2)
def test_no_dp_is_ordinary_training(context: Context, variant: str) -> None:
    """Bit for bit what the wrapper does by itself."""
    run = build(
        context, variant, name="transformer", grad_sample_mode="no_dp", poisson_sampling=False,
        distributed_sampler=True, seed=None,
    )  # fmt: skip
    train(run, 3)
    case = zoo.BY_NAME["transformer"]
    model = wrap(
        variant, case.build(), process_group=context.group, **small_buckets(variant, BUCKET_MB)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = iter(run.loader)
    for _ in range(3):
        inputs, targets, _ = next(loader)
        case.per_sample_loss(model(inputs), targets).mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(run.model.network.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert run.engine.accountant.history
    assert run.engine.get_epsilon(1e-5) == float("inf")


@pytest.mark.parametrize("variant", ["torch_ddp", "torch_ddp_tuned"])
@on_ranks(2)
def test_ordinary_training_behind_private(context: Context, variant: str) -> None:
    """PyTorch's reducer, left out of private steps, must not be left out of an ordinary one."""
    pair = Beside(context, variant)
    pair.check_step((3, 1))
    ids, _ = oracle.pick(pair.batch, part((3, 1), context.rank))
    with pytest.raises(RuntimeError, match="gradients_come_by_hand is set"):
        pair.model.module(ids).sum().backward()
    network = pair.model.to_standard_module()
    assert (pair.model.module.reduce, pair.model.module.gradients_come_by_hand) == ("mean", False)
    pair.model.module.zero_grad()
    pair.model.module(ids).sum().backward()
    pair.finish()
    of_ranks = [torch.empty_like(network.head.weight) for _ in range(context.world_size)]
    torch.distributed.all_gather(of_ranks, network.head.weight.grad, group=context.group)
    assert torch.equal(*of_ranks)
