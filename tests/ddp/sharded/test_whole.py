"""Whole parameters on demand, and checkpoints that fit everywhere."""

import copy
import pickle

import pytest
import torch

from ddp import wrap
from ddp.sharded.internals.stand_in import StandIn
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network, loss_of, tied, tokens
from tests.support.beside import wrapped


def train(model, optimizer, steps, rank: int) -> None:
    for step in steps:
        loss_of(model, step, rank).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()


def moves(context: Context) -> None:
    """A checkpoint of `fsdp` goes to `ddp_bucketed` and back, with the optimizer's state."""
    models = []
    for name in ("fsdp", "ddp_bucketed"):
        torch.manual_seed(0)
        model = wrapped(context, name, tied())
        models.append((model, model.make_optimizer(torch.optim.AdamW, lr=0.1)))
    (fsdp, sharded), (other, plain) = models
    train(fsdp, sharded, range(2), context.rank)
    other.load_state_dict(fsdp.state_dict())
    plain.load_state_dict(sharded.state_dict())
    for model, optimizer in models:
        train(model, optimizer, range(2, 4), context.rank)
    fsdp.load_state_dict(other.state_dict())
    sharded.load_state_dict(plain.state_dict())
    for model, optimizer in models:
        train(model, optimizer, range(4, 6), context.rank)
    for (key, value), (_, expected) in zip(
        fsdp.state_dict().items(), other.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(value, expected, msg=lambda m, key=key: f"{key}: {m}")


def fill_and_fail(values: torch.Tensor) -> None:
    values.fill_(3)
    raise ZeroDivisionError


def inside(context: Context) -> None:
    reference = Network()
    model = wrap("fsdp", copy.deepcopy(reference), process_group=context.group)
    with model.whole_parameters():
        if context.rank == 0:  # one rank alone
            with torch.no_grad():
                torch.testing.assert_close(model(tokens(0, 0)), reference(tokens(0, 0)))
        model.module.head.weight.data.fill_(2)
        with pytest.raises(RuntimeError, match="leave whole_parameters"):
            model.load_state_dict(model.state_dict())
        assert (model.state_dict()["module.head.weight"] == 2).all()
    assert (model.state_dict()["module.head.weight"] == 2).all()
    assert isinstance(model.module.head.weight, StandIn)
    with pytest.raises(ZeroDivisionError), model.whole_parameters():
        fill_and_fail(model.module.head.weight.data)
    state = model.state_dict()
    assert (state["module.head.weight"] == 2).all(), "what failed is not kept"
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"module.head.weight": torch.zeros(11, 6)})
    assert (model.state_dict()["module.head.weight"] == 2).all(), "half applied"
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(state, assign=True)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"copy or save"):
            copying(model)
    with pytest.raises(RuntimeError, match=r"fsdp has divided among ranks"):
        wrap("ddp", model.module, process_group=context.group)


@pytest.mark.parametrize("body", [moves, inside])
def test_whole(cpu_ranks, body):
    torch.manual_seed(0)
    cpu_ranks.run(2, body)
