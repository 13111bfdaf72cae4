"""When it is looked for where the samples are, and with how many of them."""

import torch
from torch import nn

from dp_clipping.capture.batch import Batch
from dp_clipping.capture.discovery import LayoutDiscovery
from tests.dp_clipping.conftest import count_calls, private


def discovery() -> tuple[LayoutDiscovery, nn.Module]:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    model = private(network, "bookkeeping")
    return LayoutDiscovery(network, model.capture, None, True), network


def batch_of(count: int) -> Batch:
    return Batch((torch.randn(count, 3),), {}, True)


def test_it_looks_once():
    found, _ = discovery()
    found.look = count_calls(found.look)
    for count in (4, 4, 3, 5):
        found.ensure(batch_of(count))
    assert found.look.count == 1


def test_what_one_sample_gave_is_provisional():
    found, _ = discovery()
    found.look = count_calls(found.look)
    for count, looks in ((1, 1), (1, 1), (4, 2), (4, 2), (1, 2)):
        found.ensure(batch_of(count))
        assert found.look.count == looks


def test_batches_1_2_4_8_are_checked():
    found, _ = discovery()
    checked = [found.ensure(batch_of(4)) is not None for _ in range(9)]
    assert [n for n, is_checked in enumerate(checked, 1) if is_checked] == [1, 2, 4, 8]


def test_skipped_batches_count_as_checked():
    found, _ = discovery()
    found.ensure(batch_of(4))
    found.skip_checks(2)
    assert [found.ensure(batch_of(4)) is not None for _ in range(2)] == [True, False]


def test_it_looks_again_when_told():
    found, _ = discovery()
    found.ensure(batch_of(4))
    found.look = count_calls(found.look)
    found.forget()
    assert found.ensure(batch_of(4)) is not None
    assert found.look.count == 1


def test_a_look_leaves_the_network_as_it_was():
    found, network = discovery()
    before = [p.clone() for p in network.parameters()]
    state = torch.get_rng_state()
    batch = batch_of(4)
    state = torch.get_rng_state()
    found.ensure(batch)
    assert all(map(torch.equal, before, network.parameters()))
    assert all(p.grad is None for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), state)
