"""The floor communicates nothing."""

import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_gradients_are_this_ranks_own(context: Context) -> None:
    for reduce in ("mean", "sum"):
        model = wrap("none", nn.Linear(2, 1), process_group=context.group, reduce=reduce)
        for backwards in (1, 2):
            for _ in range(backwards):
                model(torch.full((1, 2), float(context.rank))).sum().backward()
            model.finish_gradient_synchronization()
            assert (model.module.weight.grad == backwards * context.rank).all()
            assert model.stats()["collectives"] == model.stats()["bytes"] == 0
            model.zero_grad()
