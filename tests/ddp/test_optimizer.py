"""A training loop without a branch: every variant makes its optimizer and clips its gradient."""

import copy

import pytest
import torch

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss


def one_loop(context: Context, name: str) -> dict:
    torch.manual_seed(0)
    network = Chain()
    network.layers[1].bias.requires_grad_(False)
    pair = Beside(context, name, network.to(context.device))
    ours = pair.model.make_optimizer(torch.optim.AdamW, lr=0.01)
    trainable = [p for p in pair.reference.parameters() if p.requires_grad]
    plain = torch.optim.AdamW(trainable, lr=0.01)
    for step in range(3):
        pair.backward(chain_loss(step))
        pair.finish()
        most = (0.1, 1e9, 0.1)[step]
        norm = pair.model.clip_grad_norm_(most)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(trainable, most))
        pair.compare()
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
        pair.compare_values()
    if hasattr(pair.model, "units"):  # a sharded one shows what this rank has
        assert any("exp_avg" in values for values in ours.state.values())
    state = ours.state_dict()
    for number, values in plain.state_dict()["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(state["state"][number][key].cpu(), value.cpu())
    copy.deepcopy(plain).load_state_dict(state)
    ours.load_state_dict(plain.state_dict())
    return state


def test_one_loop_trains_every_variant(ranks, implementation):
    ranks.run(2, one_loop, implementation)


@pytest.mark.parametrize("name", ["torch_zero1"])
def test_it_trains_pytorchs_sharded_optimizer(cpu_ranks, name):
    cpu_ranks.run(2, one_loop, name)
