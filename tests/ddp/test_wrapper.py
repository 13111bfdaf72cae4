"""Wrappers: which of several reduces a gradient, copies, loops of other lengths on each rank."""

import copy
import io

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, wrapped


def not_copied(context: Context, name: str) -> None:
    model = wrapped(context, name)
    for copying in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"save model\.module, or model\.state_dict\(\)"):
            copying(model)


def joined(context: Context, name: str) -> None:
    """Ranks with other numbers of batches take as many steps as the one that has the fewest."""
    model = wrapped(context, name)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    for batches in ((3, 2), (1, 4), (2, 2)):
        steps = 0
        with model.join():
            for step in range(batches[context.rank]):
                optimizer.zero_grad()
                chain_loss(step)(model, context.rank).backward()
                model.finish_gradient_synchronization()
                optimizer.step()
                steps += 1
        assert steps == min(batches)
    with pytest.raises(ZeroDivisionError), model.join():
        raise ZeroDivisionError


def wrapped_again(context: Context, name: str) -> None:
    """While the first wrapper is alive and in the middle of a step: the last one is used."""
    for other in ("ddp_bucketed", "torch_ddp", name):
        pair = Beside(context, other)
        first = pair.model
        pair.backward(chain_loss(0))  # never finished
        pair.zero_grad(set_to_none=True)
        pair.model = wrapped(context, name, first.module)
        first.finish_gradient_synchronization()  # does nothing: the step is forgotten
        with pytest.raises(RuntimeError, match="this network was wrapped again"):
            chain_loss(1)(first, context.rank)
        with pytest.raises(RuntimeError, match="this network was wrapped again"):
            first.before_gradient(next(iter(first.parameters())))
        for step in range(2):
            pair.step(chain_loss(step), set_to_none=step % 2 == 0)


def on_one_trunk(context: Context, name: str) -> None:
    """An actor and a critic share a trunk: refused by name, until one of them has gone."""

    def with_head(width: int) -> nn.Module:
        return nn.Sequential(trunk, nn.Linear(6, width)).to(context.device)

    trunk = nn.Linear(6, 6)
    actor = wrapped(context, name, with_head(3))
    critic = with_head(1)
    for network in (critic, nn.ModuleDict({"of": actor})):  # around a wrapper, too
        with pytest.raises(RuntimeError, match=r"weight is a parameter of another wrapped .*0\."):
            wrapped(context, name, network)
    if context.rank == 1:  # there only: every rank is told
        del actor
        critic = nn.Linear(6, 6).to(context.device)
    with pytest.raises(RuntimeError, match=r"weight is a parameter of another wrapped network"):
        wrapped(context, name, critic)
    actor = None
    trunk.requires_grad_(False)
    assert wrapped(context, name, with_head(1)) is not None


def in_a_loop(context: Context, name: str) -> None:
    """The variable still holds the last wrapper when the next one is made."""
    network = Chain()
    for step in range(3):
        pair = Beside(context, name, network)
        pair.step(chain_loss(step))


@pytest.mark.parametrize("body", [not_copied, joined, wrapped_again, on_one_trunk, in_a_loop])
def test_wrapper(ranks, implementation, body):
    ranks.run(2, body, implementation)
