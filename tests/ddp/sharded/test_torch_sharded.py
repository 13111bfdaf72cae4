"""PyTorch's `fully_shard` and sharded optimizer, with the interface of the other variants."""

import copy

import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network, loss_of
from tests.support.beside import Chain, chain_loss, wrapped
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_fsdp_trains_and_its_checkpoints_are_whole(context: Context) -> None:
    for reduce, scale in (("mean", 1 / context.world_size), ("sum", 1.0)):
        torch.manual_seed(0)
        reference = Network()
        model = wrap(
            "torch_fsdp", copy.deepcopy(reference), reduce=reduce, process_group=context.group
        )
        optimizers = [
            model.make_optimizer(torch.optim.AdamW, lr=0.1),
            torch.optim.AdamW(reference.parameters(), lr=0.1),
        ]
        for step in range(2):
            with model.no_sync():
                loss_of(model, 10 + step, context.rank).backward()
            loss_of(model, step, context.rank).backward()
            model.finish_gradient_synchronization()
            for rank in range(context.world_size):
                (scale * loss_of(reference, 10 + step, rank)).backward()
                (scale * loss_of(reference, step, rank)).backward()
            for gradient, p in zip(model.whole_gradients(), reference.parameters(), strict=True):
                torch.testing.assert_close(gradient, p.grad)
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            torch.testing.assert_close(model.clip_grad_norm_(0.5), expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            saved, plain = (optimizer.state_dict() for optimizer in optimizers)
            for number, values in plain["state"].items():
                torch.testing.assert_close(saved["state"][number], values)
            optimizers[0].load_state_dict(plain)
            model.load_state_dict(
                {f"module.{key}": value for key, value in reference.state_dict().items()}
            )
        state = model.state_dict()
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[f"module.{key}"], value)


@on_ranks(2)
def test_a_network_that_is_sharded_already_is_refused(context: Context) -> None:
    network = wrapped(context, "torch_fsdp", Network()).module
    for name in ("ddp_bucketed", "zero1", "fsdp", "torch_ddp", "torch_fsdp"):
        with pytest.raises(RuntimeError, match=r"weight is a DTensor.*wrap\(\"torch_fsdp\", net"):
            wrapped(context, name, network)


@on_ranks(1)
def test_a_network_with_nothing_to_train_is_refused(context: Context) -> None:
    for network in (nn.Flatten(), Network().requires_grad_(False)):
        with pytest.raises(RuntimeError, match="no parameter requires a gradient"):
            wrapped(context, "torch_fsdp", network)


def whole_on_every_rank(context: Context) -> tuple[int, dict]:
    torch.manual_seed(0)
    model = wrapped(context, "torch_zero1")
    optimizer = model.make_optimizer(torch.optim.Adam, lr=0.01)
    for step in range(2):
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(values["exp_avg"].numel() for values in optimizer.optim.state.values())
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert all(state["state"].values())  # PyTorch's own class takes out those of other ranks
    return held, state


def test_zero1_divides_state_and_a_checkpoint_is_whole(cpu_ranks):
    results = cpu_ranks.run(2, whole_on_every_rank)
    numel = sum(p.numel() for p in Chain().parameters())
    assert sum(held for held, _ in results) == numel
    assert all(0 < held < numel for held, _ in results)
    (_, first), (_, second) = results
    assert len(first["state"]) == len(list(Chain().parameters()))
    for number, values in first["state"].items():
        assert torch.equal(values["exp_avg"], second["state"][number]["exp_avg"])
