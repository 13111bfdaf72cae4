"""Several wrappers, and which of them reduces a gradient."""

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Chain,
    chain_loss,
    whole_gradients,
    whole_parameters,
    wrapped,
)


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
    network = Chain().to(context.device)
    for step in range(3):
        model = wrapped(context, name, network)
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        ours = [gradient.clone() for gradient in whole_gradients(model)]
        with whole_parameters(model):
            losses = [chain_loss(step)(network, rank) for rank in range(context.world_size)]
            expected = torch.autograd.grad(sum(losses) / len(losses), list(network.parameters()))
        for g, e in zip(ours, expected, strict=True):
            torch.testing.assert_close(g, e)
        network.zero_grad()


@pytest.mark.parametrize("body", [wrapped_again, on_one_trunk, in_a_loop])
def test_several_wrappers(ranks, implementation, body):
    ranks.run(2, body, implementation)
