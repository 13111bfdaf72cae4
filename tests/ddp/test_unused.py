"""Parameters that some ranks, or all, leave out of a backward."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.backwards import computed_again
from tests.support.beside import Beside, Branches, branches_loss, is_torch
from tests.support.differences import any_order
from tests.support.on_ranks import on_ranks

Which = Callable[[int, int], list[int]]
"""`which(rank, step)`: the branches that a rank takes in a backward of a step."""

PLANS: dict[str, list[Which]] = {  # the backwards of a step
    "different_on_each_rank": [lambda r, s: [(r + s) % 3]],  # nobody takes branch 3
    "on_some_ranks_then_on_none": [
        lambda r, s: [[0, 1], [2] if r else [], [], [3, 2, 1, 0]][s % 4],
    ],
    "everything": [lambda r, s: [r, 3 - r, *{0, 1, 2, 3} - {r, 3 - r}]],
    "accumulated_under_no_sync": [lambda r, s: [r], lambda r, s: [2]],
}  # fmt: skip
BEYOND_TORCH: dict[str, list[Which]] = {
    # PyTorch's reducer would keep, on one rank, what was first used in the second backward.
    "more_in_the_second": [lambda r, s: [0], lambda r, s: [0, 1]],
    "what_the_other_had_first": [lambda r, s: [r], lambda r, s: [1 - r if r < 2 else 2]],
    "in_one_backward_each": [lambda r, s: [1] if r else [], lambda r, s: [] if r else [1]],
}


def pair_of(context: Context, name: str, reduce: str = "mean", unused: bool = True) -> Beside:
    options = {"find_unused_parameters": unused, **any_order(name)}
    return Beside(context, name, Branches(), reduce=reduce, **options)


def planned(context: Context, name: str, *plans: str) -> None:
    for plan in plans:
        for reduce in ("mean", "sum"):
            pair = pair_of(context, name, reduce)
            for step in range(5):
                for turn, which in enumerate((PLANS | BEYOND_TORCH)[plan]):
                    loss = branches_loss(2 * step + turn, lambda r, w=which, s=step: w(r, s))
                    is_local = plan == "accumulated_under_no_sync" and turn == 0
                    pair.backward(loss, synchronise=not is_local)
                pair.finish()
                pair.zero_grad(set_to_none=step in (0, 3))


@pytest.mark.parametrize("plan", PLANS)
def test_unused_parameters(ranks, implementation, plan):
    ranks.run(2, planned, implementation, plan)


@pytest.mark.parametrize("plan", BEYOND_TORCH)
def test_two_backwards_that_use_different_parameters(ranks, hand_built, plan):
    ranks.run(2, planned, hand_built, plan)


def test_unused_on_three_ranks(ranks, implementation):
    ranks.run(min(3, ranks.size), planned, implementation, "different_on_each_rank")


def untouched_where_nobody_used_it(context: Context, name: str) -> None:
    """Neither None nor an old gradient changes, so momentum alone moves nobody's parameter."""
    pair = pair_of(context, name)
    optimizers = pair.optimizers(torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(5):
        pair.train(optimizers, branches_loss(step, lambda r, s=step: [s % 2] if r == 0 else []))
    pair.step(branches_loss(9, lambda r: [0, 1, 2, 3]), set_to_none=False)
    pair.step(branches_loss(10, lambda r: [0]), set_to_none=False)
    pair.backward(branches_loss(11, lambda r: [0, 1, 2, 3]))
    pair.finish()
    pair.backward(branches_loss(12, lambda r: [0]))  # the others keep the gradients of before
    pair.finish()


def test_what_nobody_used_is_untouched(ranks, implementation):
    ranks.run(2, untouched_where_nobody_used_it, implementation)


class HiddenLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 5
        self.first, self.hidden, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, which):
        x = self.first(x)
        return self.last(computed_again(x, self.hidden) if which else x)


@on_ranks(2, "ranks")
def test_parameters_that_the_graph_does_not_show(context: Context, hand_built: str) -> None:
    """As in reentrant checkpointing: its gradient arrives although no path seemed to lead there."""
    pair = Beside(context, hand_built, HiddenLayer(), reduce="sum", find_unused_parameters=True)
    for step in range(4):
        loss = branches_loss(step, lambda r, s=step: [1] if (r + s) % 2 else [])
        loss(pair.model, context.rank).backward()
        for rank in pair.ranks:
            loss(pair.reference, rank).backward()
        pair.finish()
        pair.zero_grad(set_to_none=step % 2 == 0)


@on_ranks(2, "ranks")
def test_unfinished_reduction_names_the_parameters(context: Context, implementation: str) -> None:
    pair = pair_of(context, implementation, unused=False)
    for step in range(2):
        branches_loss(step, lambda r: [0, 2])(pair.model, context.rank).backward()
        with pytest.raises(RuntimeError) as error:
            pair.model.finish_gradient_synchronization()
        for i, layer in enumerate(pair.model.module.branches):
            for parameter_name, _ in layer.named_parameters():
                full = f"branches.{i}.{parameter_name}"
                assert (full in str(error.value)) == (i in (1, 3)), error.value
        assert "common" not in str(error.value)
        if is_torch(implementation):  # it needs a new wrapper: its next forward raises
            return
        pair.zero_grad(set_to_none=step == 0)
        pair.step(branches_loss(7, lambda r: [3, 2, 1, 0]))


@on_ranks(2, "ranks")
def test_ranks_that_miss_different_parameters(context: Context, hand_built: str) -> None:
    """Each rank misses another parameter: both raise, and the next step is right again."""
    pair = pair_of(context, hand_built, unused=False)
    for step in range(2):
        branches_loss(step, lambda r: [0, 1, 2 + r])(pair.model, context.rank).backward()
        with pytest.raises(RuntimeError, match=rf"branches\.{3 - context.rank}\.weight"):
            pair.model.finish_gradient_synchronization()
        pair.zero_grad(set_to_none=step == 0)
        pair.step(branches_loss(7 + step, lambda r: [3, 2, 1, 0]))
