"""One collective per parameter, started while backward goes on: see also test_collectives.py."""

import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_every_gradient_leaves_as_it_is_ready(context: Context) -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model = wrap("ddp_individual", network, process_group=context.group)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        assert len(model.schedule.in_flight) == 4  # nothing waits in backward
        model.finish_gradient_synchronization()
        assert model.schedule.in_flight == {}
        model.zero_grad()
    assert [launch.ready for launch in model.launches()] == [1, 2, 3, 4]
    assert model.stats() == {"collectives": 4, "bytes": 4 * 13, "buckets": 4}
