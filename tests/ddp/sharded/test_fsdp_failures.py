"""`fsdp`: steps that fail, on all ranks, in different places, or on one rank alone."""

from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddp.sharded.fsdp import HandBuiltFSDP
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network, Pair, loss_of, tokens
from tests.ddp.test_step import Failing
from tests.support.on_ranks import on_ranks
from tests.support.turns import in_turn


class FailingNetwork(Network):
    """Fails before block `at`, before the head, or after it; in `phase`."""

    phase = "backward"
    at: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for k, block in enumerate(self.blocks):
            x = self.fail(x, k)
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        x = self.head(self.fail(x, len(self.blocks)))
        return self.fail(x, len(self.blocks) + 1)

    def fail(self, x: Tensor, k: int) -> Tensor:
        if k != self.at:
            return x
        if self.phase == "forward":
            raise ArithmeticError("forward failed on purpose")
        return Failing.apply(x)


def fail(pair: Pair, step: int, places: list[int], phase: str = "backward") -> None:
    network = pair.model.module
    network.at, network.phase = places[pair.rank], phase
    with pytest.raises(ArithmeticError):
        loss_of(pair.model, 50 + step, pair.rank).backward()
    network.at = None


@pytest.mark.parametrize(
    ("places", "options"),
    in_turn([[3, 0], [0, 2], [1, 1], [2, 1], [4, 1]], [{}, {"find_unused_parameters": True}]),
)
@on_ranks(2)
def test_a_backward_fails_in_another_place_on_each_rank(
    context: Context, places: list[int], options: dict
) -> None:
    """In the first step, in later ones, and under `no_sync`; evaluation or a step comes next."""
    pair = Pair(context, FailingNetwork(checkpointed=places[0] == 2), **options)
    for step in range(4):
        fail(pair, step, places)
        if step == 2:
            with torch.no_grad():
                loss_of(pair.model, 70, context.rank)
        if step % 2:
            pair.model.zero_grad()
        with pair.model.no_sync():
            fail(pair, step, places)
            pair.backward(step)
        pair.backward(10 + step)
        pair.finish()
        pair.step()


@on_ranks(2)
def test_a_forward_fails(context: Context) -> None:
    """On all ranks in the same place, before the first step and behind it."""
    pair = Pair(context, FailingNetwork())
    for step, place in enumerate((1, 0, 3)):
        fail(pair, step, [place, place], "forward")
        pair.backward(step)
        pair.finish()
        pair.step()


def alone(context: Context) -> None:
    """Rank 0 evaluates alone: the timeout says what may have happened, and what to do."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = HandBuiltFSDP(Network(), process_group=group)
    if context.rank == 0:
        with torch.no_grad(), pytest.raises(RuntimeError, match="imed out") as error:
            model(tokens(0, 0))
        (note,) = error.value.__notes__
        assert note.startswith("the gather of what is in no block has failed")
        assert "`with model.whole_parameters():`" in note


@pytest.mark.slow
def test_the_timeout_says_what_happened(own_ranks):
    own_ranks.run(own_ranks.size, alone)


class WithStatistics(Network):
    """Its buffers are broadcast as a training forward begins."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1000))


CURE = {
    "without gradients": r"with model\.whole_parameters\(\):",
    "in eval mode": r"with model\.whole_parameters\(\):",
    "under no_sync": "leave a step out on all",
}


@pytest.mark.parametrize("how", CURE)
@on_ranks(2)
def test_a_rank_that_evaluates_where_others_train_is_named(context: Context, how: str) -> None:
    """All hear of it before anything is sent, and training goes on."""
    torch.manual_seed(0)
    pair = Pair(context, WithStatistics())
    pair.backward(0)
    pair.finish()
    pair.step()
    is_alone, says = context.rank == 0, rf"a forward {how}\S* on rank 0, a forward on rank 1.*"
    with ExitStack() as contexts:
        if is_alone and how == "under no_sync":
            contexts.enter_context(pair.model.no_sync())
        elif is_alone and how == "without gradients":
            contexts.enter_context(torch.no_grad())
        pair.model.train(not is_alone or how == "under no_sync")
        with pytest.raises(RuntimeError, match=says + CURE[how]):
            loss_of(pair.model, 1, context.rank)
    pair.model.train()
    pair.backward(3)
    pair.finish()
    pair.step()


@on_ranks(2)
def test_a_backward_fails_on_one_rank_alone(context: Context) -> None:
    """It goes on with its next batch where the others step: all hear of it, and nothing changes."""
    pair = Pair(context, FailingNetwork())
    pair.backward(0)
    pair.finish()
    pair.step()
    message = r"a forward on rank 0, optimizer\.step\(\) behind reduction \d+ on rank 1"
    if context.rank == 0:
        fail(pair, 1, [1, 1])
        with pytest.raises(RuntimeError, match=message):
            loss_of(pair.model, 2, context.rank)
    else:
        loss_of(pair.model, 1, context.rank).backward()
        pair.model.finish_gradient_synchronization()
        assert any(gradient.isnan().any() for *_, gradient in pair.model.gradient_pieces())
        with pytest.raises(RuntimeError, match=message):
            pair.optimizer.step()
    pair.model.zero_grad()
    pair.backward(3)
    pair.finish()
    pair.step()


@on_ranks(2)
def test_a_step_is_left_out_on_one_rank_alone(context: Context) -> None:
    """Rank 0 steps and rank 1 goes on; the second time rank 0's step fails."""
    pair = Pair(context, FailingNetwork())
    for left_out in (True, False):
        pair.backward(0)
        pair.finish()
        if context.rank == 1:
            with pytest.raises(RuntimeError, match=r"a forward on rank 1|failed on rank 0"):
                loss_of(pair.model, 1, context.rank)
        elif left_out:
            with pytest.raises(RuntimeError, match="a forward on rank 1"):
                pair.optimizer.step()
        else:
            with pytest.raises(ZeroDivisionError):
                pair.optimizer.step(lambda: 1 / 0)
        pair.step()
