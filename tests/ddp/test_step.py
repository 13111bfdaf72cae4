"""Failed and abandoned steps, and what is left when a wrapper goes."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Branches,
    Chain,
    branches_loss,
    chain_loss,
    make_optimizer,
    numbers,
    small_buckets,
    wrapped,
)
from tests.support.differences import any_order
from tests.support.on_ranks import on_ranks


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("backward failed on purpose")


class FailingChain(nn.Module):
    """Its backward fails at the input of layer `fails_at`, at its output if there is none."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.fails_at: int | None = None

    def forward(self, x):
        x.requires_grad_()
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(Failing.apply(x) if i == self.fails_at else x))
        return Failing.apply(x) if self.fails_at == len(self.layers) else x


def failed_backward(context: Context, name: str, places: list[int], unused: bool) -> None:
    """`places[rank]`: where it fails; at 0 every gradient has arrived, at 4 none has."""
    for set_to_none in (True, False, None):  # None: the user does not zero at all
        options = dict(small_buckets(name), find_unused_parameters=unused)
        pair = Beside(context, name, FailingChain(), **options)
        for step in range(2):
            pair.model.module.fails_at = places[context.rank]
            with pytest.raises(ArithmeticError):
                chain_loss(50 + step)(pair.model, context.rank).backward()
            pair.model.module.fails_at = None
            if set_to_none is not None:
                pair.zero_grad(set_to_none)
            pair.step(chain_loss(step))
        unused = not unused


@pytest.mark.parametrize(
    ("places", "unused"),
    [([0, 0], False), ([2, 2], True), ([3, 0], False), ([4, 0], True), ([4, 4], False)],
)
def test_a_failed_backward_does_not_poison_the_next_step(ranks, hand_built, places, unused):
    """`find_unused_parameters` is `unused`, and then in turn."""
    ranks.run(2, failed_backward, hand_built, places, unused)


def finished_failure(context: Context, name: str) -> None:
    pair = Beside(context, name, FailingChain(), find_unused_parameters=True)
    for step in range(2):
        pair.model.module.fails_at = 2
        with pytest.raises(ArithmeticError):
            chain_loss(50 + step)(pair.model, context.rank).backward()
        pair.model.module.fails_at = None
        with pytest.raises(RuntimeError, match=r"backward of this step has failed.*next batch"):
            pair.model.finish_gradient_synchronization()
        pair.model.finish_gradient_synchronization()  # nothing is left to finish
        pair.step(chain_loss(step))


def test_what_a_failed_backward_has_not_reached_is_not_unused(ranks, hand_built):
    ranks.run(2, finished_failure, hand_built)


@on_ranks(1)
def test_a_backward_that_fails_before_its_first_gradient_is_seen(context: Context) -> None:
    """It is seen, until the next training forward discards it; one that ends well is none."""
    model = wrapped(context, "ddp_bucketed", FailingChain())
    for place in (4, None, 4):
        model.module.fails_at = place
        loss = chain_loss(0)(model, context.rank)
        assert not model.step.has_failed()
        if place is None:
            loss.backward()
            model.finish_gradient_synchronization()
        else:
            with pytest.raises(ArithmeticError):
                loss.backward()
        assert model.step.has_failed() is (place is not None)


def abandoned(context: Context, name: str) -> None:
    """A forward after a partial backward discards the partial step, zeroed or not."""
    pair = Beside(context, name, Branches(), **any_order(name))
    for step, set_to_none in enumerate([True, False, None]):
        branches_loss(step, lambda r: [0, 1])(pair.model, context.rank).backward()
        if set_to_none is not None:
            pair.zero_grad(set_to_none)
        pair.step(branches_loss(9 + step, lambda r: [3, 2, 1, 0]))
        branches_loss(step, lambda r: [0, 1, 2, 3])(pair.model, context.rank)  # no backward
        pair.step(branches_loss(20 + step, lambda r: [3, 2, 1, 0]))


def test_a_forward_discards_a_partial_step(ranks, hand_built):
    ranks.run(2, abandoned, hand_built)


def alive(kind: type) -> int:
    gc.collect()
    return sum(isinstance(thing, kind) for thing in gc.get_objects())


@on_ranks(2, "ranks")
def test_nothing_leaks_over_fifty_steps(context: Context, implementation: str) -> None:
    """As many handles and tensors after fifty steps as after five."""
    torch.manual_seed(0)
    model = wrapped(context, implementation)
    optimizer = make_optimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)
    counts = []
    for step in range(50):
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in (4, 49):
            counts.append((alive(dist.Work), alive(torch.Tensor), reachable_works(model)))
    for early, late in zip(*counts, strict=True):  # 45 steps apart
        assert late <= early + 5, f"(handles, tensors, held handles) grew: {counts}"
    assert counts[1][2] == 0, "handles of a finished step are still held"


def reachable_works(model: nn.Module) -> int:
    """Handles that the wrapper's own attributes still hold (gc's list lacks pybind objects)."""
    seen, stack, found = set(), [vars(model)], 0
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        found += isinstance(thing, dist.Work)
        if isinstance(thing, dict):
            stack += thing.values()
        elif isinstance(thing, list | tuple | set):
            stack += thing
    return found


def hooks_of(module: nn.Module) -> int:
    return sum(
        len(p._backward_hooks or {}) + len(p._post_accumulate_grad_hooks or {})
        for p in module.parameters()
    ) + sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules())


@on_ranks(2, "ranks")
def test_a_wrapper_leaves_no_trace(context: Context, implementation: str) -> None:
    module = Chain().to(context.device)
    for turn in range(3):  # the same network, wrapped again and again
        pair = Beside(context, implementation, module)
        for _ in range(2):
            pair.step(chain_loss(turn))
        gone, reference = weakref.ref(pair.model), pair.reference
        del pair
        gc.collect()
        assert gone() is None, "something keeps the wrapper alive"
        assert hooks_of(module) == 0
        for network in (module, reference):
            chain_loss(turn)(network, context.rank).backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        module.zero_grad()


@on_ranks(2, "ranks")
def test_parameters_frozen_later_are_named(context: Context, implementation: str) -> None:
    """A parameter frozen after wrapping gets no gradient: the error names it."""
    pair = Beside(context, implementation, Branches(count=2))
    pair.model.module.branches[1].requires_grad_(False)
    x = numbers(3, 5, seed=0, rank=context.rank, like=pair.model)
    pair.model(x, [0, 1]).sum().backward()
    with pytest.raises(RuntimeError, match=r"branches\.1\.weight, branches\.1\.bias"):
        pair.model.finish_gradient_synchronization()
