"""PyTorch's sharded optimizer: state is divided, and a checkpoint is whole on every rank."""

import torch

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Chain, chain_loss, wrapped


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


def test_state_is_divided_and_a_checkpoint_whole(cpu_ranks):
    results = cpu_ranks.run(2, whole_on_every_rank)
    numel = sum(p.numel() for p in Chain().parameters())
    assert sum(held for held, _ in results) == numel
    assert all(0 < held < numel for held, _ in results)
    (_, first), (_, second) = results
    assert len(first["state"]) == len(list(Chain().parameters()))
    for number, values in first["state"].items():
        assert torch.equal(values["exp_avg"], second["state"][number]["exp_avg"])
