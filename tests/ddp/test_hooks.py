"""A user's hooks, custom functions and whatever else touches a gradient during backward."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.conftest import SHARDED
from tests.ddp.test_watch import plain
from tests.support.beside import (
    Chain,
    chain_loss,
    is_torch,
    numbers,
    small_buckets,
    whole_gradients,
    whole_parameters,
    wrapped,
)
from tests.support.on_ranks import on_ranks


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = (parameter.grad * 3 + 1).t().contiguous().t()  # with strides of its own


def in_place(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3).add_(1)


def dropped(parameter: nn.Parameter) -> None:
    parameter.grad = None


def post_accumulate(context: Context, name: str) -> None:
    """Hooks from before and after `wrap` act on the local gradient, and their result is reduced."""
    for hook in (replaced, in_place, dropped):
        for is_early in (True, False):
            network = Chain().to(context.device)
            if is_early:
                register(network, hook)
            model = wrapped(context, name, network)
            if not is_early:
                register(network, hook)
            for step in range(3):
                chain_loss(step)(model, context.rank).backward()
                model.finish_gradient_synchronization()
                check(context, model, step, hook)
                network.zero_grad(set_to_none=step == 0)


def register(network: nn.Module, hook: Callable) -> None:
    for layer in network.layers:
        layer.weight.register_post_accumulate_grad_hook(hook)


def check(context: Context, model: nn.Module, step: int, hook: Callable) -> None:
    with whole_parameters(model):
        reference = copy.deepcopy(model.module)
    for rank in range(context.world_size):
        loss = chain_loss(step)(reference, rank)
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        for p, gradient in zip(reference.parameters(), gradients, strict=True):
            if p.dim() > 1:
                gradient = 0 * gradient if hook is dropped else gradient * 3 + 1
            share = gradient / context.world_size
            p.grad = share if rank == 0 else p.grad + share
    for gradient, q in zip(whole_gradients(model), reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, q.grad)


class Broken(Exception):
    pass


def hook_that_raises(context: Context, name: str) -> None:
    """The step fails as any backward that raises, and the next one is right."""
    network = Chain().to(context.device)
    model = wrapped(context, name, network)

    def hook(_parameter: nn.Parameter) -> None:
        raise Broken

    handle = network.layers[1].weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(Broken):
        chain_loss(0)(model, context.rank).backward()
    handle.remove()
    network.zero_grad()
    register(network, in_place)
    chain_loss(1)(model, context.rank).backward()
    model.finish_gradient_synchronization()
    check(context, model, 1, in_place)


def optimizer_in_backward(context: Context, name: str) -> None:
    """It would step with this rank's gradient; of a fused one, which counts no writes, tell us."""
    for fused in (False, True)[: 1 if name in SHARDED else 2]:
        _optimizer_in_backward(context, name, fused)


def _optimizer_in_backward(context: Context, name: str, fused: bool) -> None:
    network = Chain().to(context.device)
    model = wrapped(context, name, network)
    make = model.make_optimizer if fused else plain
    optimizer = make(torch.optim.SGD, [network.layers[0].weight], lr=0.1, fused=fused)

    def hook(_parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    network.layers[0].weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight was changed by a hook"):
        chain_loss(0)(model, context.rank).backward()


def created_graphs(context: Context, name: str) -> None:
    network = Chain().to(context.device)
    register(network, in_place)
    model = wrapped(context, name, network)
    for step in range(2):
        chain_loss(step)(model, context.rank).backward(create_graph=True)
        model.finish_gradient_synchronization()
        check(context, model, step, in_place)
        network.zero_grad()


@pytest.mark.parametrize("body", [post_accumulate, optimizer_in_backward])
def test_hooks_of_a_user(ranks, implementation, body):
    ranks.run(2, body, implementation)


@pytest.mark.parametrize("body", [hook_that_raises, created_graphs])
def test_hooks_beyond_torch(ranks, hand_built, body):
    """PyTorch's reducer cannot go on after a failed backward, and refuses `create_graph`."""
    ranks.run(2, body, hand_built)


class Scaled(torch.autograd.Function):
    """`x * scale`, with None for the gradient of `scale` where `has_none` says so."""

    @staticmethod
    def forward(ctx, x, scale, has_none):
        ctx.save_for_backward(x, scale)
        ctx.has_none = has_none
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, None if ctx.has_none else (gradient * x).sum(0), None


class WithNone(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.arange(1.0, 7.0))

    def forward(self, x: Tensor, has_none: bool) -> Tensor:
        return Scaled.apply(self.first(x), self.scale, has_none)


def none_loss(model: nn.Module, seed: int, rank: int, has_none: bool) -> Tensor:
    return model(numbers(4, 6, seed=seed, rank=rank, like=model), has_none).square().sum()


@on_ranks(2, "ranks")
def test_a_gradient_of_none_counts_as_zero(context: Context, implementation: str) -> None:
    """`plans[backward][rank]`: does it return None? Zero then; unused, if that is allowed."""
    plans = [[[True, False]], [[True, True]], [[True, False], [True, False]]]
    plans += [[[True, True], [False, True]], [[False, False], [True, False]], 2 * [[True, True]]]
    for reduce in ("mean", "sum"):
        for unused in (False, True):
            options = dict(
                small_buckets(implementation), find_unused_parameters=unused, reduce=reduce
            )
            network = WithNone().to(context.device)
            model = wrapped(context, implementation, network, **options)
            for step, plan in enumerate(plans):
                if unused and len(plan) > 1 and is_torch(implementation):
                    continue  # PyTorch keeps what only another rank used in an earlier backward
                expected = None if unused else torch.zeros_like(network.scale)
                for turn, has_none in enumerate(plan):
                    seed = 10 * step + turn
                    none_loss(model, seed, context.rank, has_none[context.rank]).backward()
                    for rank in range(2):
                        if not has_none[rank]:
                            loss = none_loss(network, seed, rank, False)
                            (share,) = torch.autograd.grad(loss, network.scale)
                            share = share if reduce == "sum" else share / 2
                            expected = share if expected is None else expected + share
                model.finish_gradient_synchronization()
                got = whole_gradients(model)[0]
                if expected is None:
                    assert got is None
                else:
                    torch.testing.assert_close(got, expected)
                network.zero_grad()
