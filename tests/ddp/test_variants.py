"""Tests what one variant has of its own: see also test_collectives.py and test_models.py."""

import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import wrapped
from tests.support.on_ranks import on_ranks


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


@on_ranks(2)
def test_gradients_stay_where_they_are(context: Context) -> None:
    network = small_network()
    model = wrapped(context, "ddp_individual_v2", network, bucket_size_mb=None)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    assert model.stats() == {"collectives": 1, "bytes": 4 * 13, "buckets": 1}


@on_ranks(2)
def test_gradients_are_slices_of_one_buffer(context: Context) -> None:
    network = small_network()
    model = wrapped(context, "ddp_bucketed", network, bucket_size_mb=None)
    for set_to_none in (False, True, True):
        model(torch.ones(1, 2)).sum().backward()
        model.finish_gradient_synchronization()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert len(storages) == 1
        assert all(p.grad.data_ptr() % 16 == 0 for p in model.parameters())
        model.zero_grad(set_to_none=set_to_none)
    loss = model(torch.ones(1, 2)).sum()
    assert not model.flats  # nothing of the last step is kept while activations grow
    loss.backward()
    model.finish_gradient_synchronization()
    assert model.stats() == {"collectives": 1, "bytes": 4 * 13, "buckets": 1}
