"""A step that fails on one rank: every rank hears of it at once, and can go on."""

from collections.abc import Callable

import pytest
import torch

from ddp.sharded.fsdp import HandBuiltFSDP
from ddp.sharded.internals.agreement import ToldError, agree, status_of
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network, loss_of
from tests.support.beside import Beside, chain_loss, whole_values
from tests.support.on_ranks import on_ranks
from tests.support.turns import in_turn

NAMES = ["zero1", "zero2", "fsdp"]
LONG = "failed on purpose {" + 99 * "é " + 99 * "é"


def in_a_hook(pair: Beside, optimizer: torch.optim.Optimizer) -> None:
    def hook(*_):
        raise ArithmeticError(LONG)

    handle = optimizer.register_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()


def in_the_closure(pair: Beside, optimizer: torch.optim.Optimizer) -> None:
    def closure():
        raise ArithmeticError(LONG)

    optimizer.step(closure)


def refused(pair: Beside, optimizer: torch.optim.Optimizer) -> None:
    parameter = next(pair.model.parameters())
    kept, parameter.grad = parameter.grad, torch.zeros(parameter.shape)
    try:
        optimizer.step()
    finally:
        parameter.grad = kept


def where_it_begins(pair: Beside, optimizer: torch.optim.Optimizer) -> None:
    def fails(_units):
        raise ArithmeticError(LONG)

    pair.model.begin_step = fails
    try:
        optimizer.step()
    finally:
        del pair.model.begin_step


FAILURES = {
    fail.__name__: fail for fail in (in_a_hook, where_it_begins, in_the_closure, refused)
}  # fmt: skip


@pytest.mark.parametrize(("name", "fail"), in_turn(NAMES, FAILURES, fast=2))
@on_ranks(2)
def test_a_step_that_fails_on_one_rank_changes_nothing(
    context: Context, name: str, fail: Callable
) -> None:
    """In the first step, in later ones, on one rank or on both; a schedule wraps `step` too."""
    pair = Beside(context, name)
    ours = pair.model.make_optimizer(torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(pair.reference.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, plain)]
    for step, failing in enumerate(([1], [0, 1], [0])):
        pair.backward(chain_loss(step))
        pair.finish()
        values, state = whole_values(pair.model), ours.state_dict()
        if context.rank in failing:
            with pytest.raises((ArithmeticError, RuntimeError), match=r"on purpose|is this rank"):
                fail(pair, ours)
        else:
            with pytest.raises(RuntimeError) as error:
                ours.step()
            message = "failed on rank [01], and nothing has changed on any rank: "
            assert error.match(
                message + r"(ArithmeticError: failed on purpose \{é|RuntimeError: \w+\.0)"
            )
        for now, before in zip(whole_values(pair.model), values, strict=True):
            assert torch.equal(now, before)
        assert str(ours.state_dict()) == str(state)
        for optimizer, schedule in zip((ours, plain), schedules, strict=True):
            optimizer.step()
            schedule.step()
        pair.compare_values()
        pair.zero_grad(set_to_none=True)


class FailingAdam(torch.optim.Adam):
    """Fails while it steps."""

    fails, treats_elements_alone = False, True

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("out of memory on purpose")
        return super().step(closure)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_a_step_that_fails_late_is_named_in_the_next_one(context: Context, name: str) -> None:
    """Where others step already: they do not wait, and all refuse to go on without a checkpoint."""
    pair = Beside(context, name)
    optimizer = pair.model.make_optimizer(FailingAdam, lr=0.1)
    model_state, state = pair.model.state_dict(), optimizer.state_dict()
    model_state = {key: value.clone() for key, value in model_state.items()}
    pair.backward(chain_loss(0))
    pair.finish()
    FailingAdam.fails = context.rank == 1
    if context.rank == 1:
        with pytest.raises(ArithmeticError):
            optimizer.step()
    else:
        optimizer.step()
    FailingAdam.fails = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"on rank 1.*a checkpoint.*of memory on purpose"):
            optimizer.step()
    pair.model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    optimizer.step()
    plain = torch.optim.Adam(pair.reference.parameters(), lr=0.1)
    plain.step()
    pair.compare_values()


def test_who_does_something_else_or_cannot_is_named():
    step, other = "optimizer.step() behind reduction 4", "optimizer.step() behind reduction 8"
    agree(lambda mine: [mine, mine], step)
    with pytest.raises(
        ToldError, match=r"step\(\) behind reduction 4 on rank 0, .* 8 on rank 2\. "
    ):
        agree(lambda mine: [mine, mine, status_of(other)], step)
    with pytest.raises(ToldError, match=r"^it has failed$"):
        agree(lambda mine: [mine, status_of(other, "it has failed")], step)
    with pytest.raises(ToldError, match=r"^it has failed$"):
        agree(lambda mine: [mine, status_of(step)], step, "it has failed")


@on_ranks(2)
def test_steps_of_two_optimizers(context: Context) -> None:
    """One rank leaves the second one's step out, and another begins one with a closure."""
    model = HandBuiltFSDP(Network(), process_group=context.group)
    parts = [*model.module.blocks.parameters()], [*model.module.head.parameters()]
    first, second = (model.make_optimizer(torch.optim.SGD, params, lr=0.1) for params in parts)

    def closure():
        loss = loss_of(model, 0, context.rank)
        loss.backward()
        model.finish_gradient_synchronization()
        return loss

    closure()
    first.step()
    if context.rank == 0:
        with pytest.raises(ToldError, match="a forward on rank 0"):
            loss_of(model, 1, context.rank)
    else:
        with pytest.raises(ToldError, match="a forward on rank 0"):
            second.step()
    closure()
    if context.rank == 0:  # an error that all have been told is not told again
        with pytest.raises(ToldError, match="a forward on rank 0"):
            first.step(closure)
    else:
        with pytest.raises(ToldError, match="a forward on rank 0"):
            second.step()
    for optimizer in (first, second):
        optimizer.step(closure)
