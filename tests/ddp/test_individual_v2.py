"""Coalesced groups, in place: see also test_collectives.py."""

import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_gradients_stay_where_they_are(context: Context) -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, dtype=torch.float32))
    model = wrap("ddp_individual_v2", network, process_group=context.group, bucket_size_mb=None)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    assert model.stats() == {"collectives": 1, "bytes": 4 * 13, "buckets": 1}
