"""Several wrappers, and which of them reduces a gradient."""

import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Chain,
    chain_loss,
    small_buckets,
    whole_gradients,
    whole_parameters,
)


def in_turn(context: Context, name: str) -> None:
    """A network that is wrapped again while its first wrapper is alive and in the middle of a step.

    Afterwards either wrapper may be used.
    """
    for other in ("ddp_bucketed", "torch_ddp", name):
        pair = Beside(context, other, Chain(), **small_buckets(other))
        first = pair.model
        pair.backward(chain_loss(0))  # never finished
        pair.zero_grad(set_to_none=True)
        second = wrap(name, first.module, process_group=context.group, **small_buckets(name))
        first.finish_gradient_synchronization()  # does nothing: the step is forgotten
        for step, model in enumerate([second, first, first, second]):
            pair.model = model
            pair.step(chain_loss(step), set_to_none=step % 2 == 0)


def not_at_once(context: Context, name: str) -> None:
    first = wrap(name, Chain().to(context.device), process_group=context.group)
    second = wrap(name, first.module, process_group=context.group)
    chain_loss(0)(first, context.rank).backward()
    with pytest.raises(RuntimeError, match=r"another wrapper .* call finish_gradient_sync"):
        chain_loss(0)(second, context.rank)
    first.finish_gradient_synchronization()
    chain_loss(1)(second, context.rank).backward()
    second.finish_gradient_synchronization()


def on_one_trunk(context: Context, name: str) -> None:
    """An actor and a critic share a trunk: refused by name, until one of them has gone."""

    def with_head(width: int) -> nn.Module:
        return nn.Sequential(trunk, nn.Linear(6, width)).to(context.device)

    trunk = nn.Linear(6, 6)
    actor = wrap(name, with_head(3), process_group=context.group)
    critic = with_head(1)
    for network in (critic, nn.ModuleDict({"of": actor})):  # around a wrapper, too
        with pytest.raises(RuntimeError, match=r"weight is a parameter of another wrapped .*0\."):
            wrap(name, network, process_group=context.group)
    if context.rank == 1:  # there only: every rank is told
        del actor
        critic = nn.Linear(6, 6).to(context.device)
    with pytest.raises(RuntimeError, match=r"weight is a parameter of another wrapped network"):
        wrap(name, critic, process_group=context.group)
    actor = None
    trunk.requires_grad_(False)
    assert wrap(name, with_head(1), process_group=context.group) is not None


def in_a_loop(context: Context, name: str) -> None:
    """The variable still holds the last wrapper when the next one is made."""
    network = Chain().to(context.device)
    for step in range(3):
        model = wrap(name, network, process_group=context.group, **small_buckets(name))
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        ours = [gradient.clone() for gradient in whole_gradients(model)]
        with whole_parameters(model):
            losses = [chain_loss(step)(network, rank) for rank in range(context.world_size)]
            expected = torch.autograd.grad(sum(losses) / len(losses), list(network.parameters()))
        for g, e in zip(ours, expected, strict=True):
            torch.testing.assert_close(g, e)
        network.zero_grad()


def by_another_variant(context: Context, name: str) -> None:
    network = Chain().to(context.device)
    pair = (
        wrap(name, network, process_group=context.group),
        wrap("ddp", network, process_group=context.group),
    )
    for step, model in enumerate(pair):
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()


@pytest.mark.parametrize(
    "body", [by_another_variant, in_turn, not_at_once, on_one_trunk, in_a_loop]
)
def test_several_wrappers(ranks, implementation, body):
    ranks.run(2, body, implementation)
