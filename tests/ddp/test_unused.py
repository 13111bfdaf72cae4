"""Parameters that some ranks, or all, leave out of a backward."""

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Branches,
    branches_loss,
    is_torch,
    make_optimizer,
    small_buckets,
    whole_values,
)
from tests.support.differences import any_order
from tests.support.on_ranks import on_ranks


def pair_of(context: Context, name: str, reduce: str = "mean", **options) -> Beside:
    options = {
        "find_unused_parameters": True, **small_buckets(name), **any_order(name), **options
    }  # fmt: skip
    return Beside(context, name, Branches(), reduce=reduce, **options)


def different_on_each_rank(context: Context, name: str) -> None:
    for reduce in ("mean", "sum"):
        for set_to_none in (True, False):
            pair = pair_of(context, name, reduce)
            for step in range(4):
                # Branch 3 is used by nobody, the others by one rank each, alternating.
                pair.step(branches_loss(step, lambda r, s=step: [(r + s) % 3]), set_to_none)


def on_some_ranks_then_on_none(context: Context, name: str) -> None:
    pair = pair_of(context, name)
    plans = [lambda r: [0, 1], lambda r: [2] if r else [], lambda r: [], lambda r: [3, 2, 1, 0]]
    for step, which in enumerate(plans * 2):
        pair.step(branches_loss(step, which))


def untouched_where_nobody_used_it(context: Context, name: str) -> None:
    """Neither None nor an old gradient changes, so momentum alone moves nobody's parameter."""
    pair = pair_of(context, name)
    optimizers = [
        make_optimizer(m, torch.optim.SGD, lr=0.1, momentum=0.9)
        for m in (pair.model, pair.reference)
    ]
    for step in range(5):
        pair.backward(branches_loss(step, lambda r, s=step: [s % 2] if r == 0 else []))
        pair.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    for p, q in zip(whole_values(pair.model), pair.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    pair.step(branches_loss(9, lambda r: [0, 1, 2, 3]), set_to_none=False)
    pair.step(branches_loss(10, lambda r: [0]), set_to_none=False)
    pair.backward(branches_loss(11, lambda r: [0, 1, 2, 3]))
    pair.finish()
    pair.backward(branches_loss(12, lambda r: [0]))  # the others keep the gradients of before
    pair.finish()


@on_ranks(2, "ranks")
def test_two_backwards_that_use_different_parameters(context: Context, hand_built: str) -> None:
    """PyTorch's reducer would keep, on one rank, what was first used in the second backward."""
    for reduce in ("mean", "sum"):
        for first, second in [
            (lambda r: [0], lambda r: [0, 1]),
            (lambda r: [r], lambda r: [1 - r if r < 2 else 2]),  # each what the other had first
            (lambda r: [1] if r else [], lambda r: [] if r else [1]),
        ]:
            pair = pair_of(context, hand_built, reduce)
            for step in range(3):
                pair.backward(branches_loss(2 * step, first))
                pair.backward(branches_loss(2 * step + 1, second))
                pair.finish()
                pair.zero_grad(set_to_none=step == 0)


def accumulated_under_no_sync(context: Context, name: str) -> None:
    """What a rank used under `no_sync` only counts as used."""
    for reduce in ("mean", "sum"):
        pair = pair_of(context, name, reduce)
        for step in range(3):
            pair.backward(branches_loss(2 * step, lambda r: [r]), synchronise=False)
            pair.backward(branches_loss(2 * step + 1, lambda r: [2]))
            pair.finish()
            pair.zero_grad(set_to_none=True)


def everything_used_all_the_same(context: Context, name: str) -> None:
    pair = pair_of(context, name)
    for step in range(3):
        pair.step(branches_loss(step, lambda r: [r, 3 - r, *{0, 1, 2, 3} - {r, 3 - r}]))


@pytest.mark.parametrize(
    "body",
    [
        different_on_each_rank,
        on_some_ranks_then_on_none,
        untouched_where_nobody_used_it,
        accumulated_under_no_sync,
        everything_used_all_the_same,
    ],
)
def test_unused_parameters(ranks, implementation, body):
    ranks.run(2, body, implementation)


def test_unused_on_three_ranks(ranks, implementation):
    ranks.run(min(3, ranks.size), different_on_each_rank, implementation)


class Hidden(torch.autograd.Function):
    """Runs a layer's backward inside its own: the graph does not show the layer's parameters."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


class HiddenLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 5
        self.first, self.hidden, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, which):
        x = self.first(x)
        return self.last(Hidden.apply(x, self.hidden) if which else x)


@on_ranks(2, "ranks")
def test_parameters_that_the_graph_does_not_show(context: Context, hand_built: str) -> None:
    """As in reentrant checkpointing: its gradient arrives although no path seemed to lead there."""
    options = dict(small_buckets(hand_built), find_unused_parameters=True)
    pair = Beside(context, hand_built, HiddenLayer(), reduce="sum", **options)
    for step in range(4):
        loss = branches_loss(step, lambda r, s=step: [1] if (r + s) % 2 else [])
        loss(pair.model, context.rank).backward()
        for rank in pair.ranks:
            loss(pair.reference, rank).backward()
        pair.finish()
        pair.zero_grad(set_to_none=step % 2 == 0)


@on_ranks(2, "ranks")
def test_unfinished_reduction_names_the_parameters(context: Context, implementation: str) -> None:
    pair = pair_of(context, implementation, find_unused_parameters=False)
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
    pair = pair_of(context, hand_built, find_unused_parameters=False)
    for step in range(2):
        branches_loss(step, lambda r: [0, 1, 2 + r])(pair.model, context.rank).backward()
        with pytest.raises(RuntimeError, match=rf"branches\.{3 - context.rank}\.weight"):
            pair.model.finish_gradient_synchronization()
        pair.zero_grad(set_to_none=step == 0)
        pair.step(branches_loss(7 + step, lambda r: [3, 2, 1, 0]))
