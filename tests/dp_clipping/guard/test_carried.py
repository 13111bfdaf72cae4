"""Tests that what runs of a check change is put back; refusals are in `trials/test_state.py`."""

from functools import partial

import pytest
import torch
from torch import nn

from dp_clipping.capture.samples.batch import Batch
from dp_clipping.guard.carried import Carried, Restored
from dp_clipping.trials.objects import State


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(2, 2), None

    def forward(self, x):
        return self.layer(x)


class KeepsTheLast(Network):
    def forward(self, x):
        self.last = x.detach()
        return self.layer(x)


class Hooked(Network):
    """Registers a hook in the first forward, and notes that it has, as Hugging Face's models do."""

    def forward(self, x):
        if self.last is None:
            self.last = True
            self.layer.register_forward_hook(lambda module, args, y: 2 * y)
        return self.layer(x)


def test_a_body_leaves_nothing_behind():
    network = KeepsTheLast()
    with Restored(State(network, False)) as own:
        network(torch.ones(1, 2))
    assert network.last is None
    assert [change.name for change in own.changes] == ["last"]


def test_an_error_in_a_body_is_raised_when_all_is_put_back():
    network = KeepsTheLast()
    with pytest.raises(RuntimeError, match="shapes"), Restored(State(network, False)):
        network(torch.ones(1, 3))
    assert network.last is None


def test_hooks_are_put_back_with_what_notes_them():
    network = Hooked()
    network.layer.register_forward_hook(lambda *_: None)
    for _ in range(2):
        with Restored(State(network, False)):
            network(torch.ones(1, 2))
        assert len(network.layer._forward_hooks) == 1
    carried, x = Carried(State(network), network, partial(Batch, batch_first=True)), torch.eye(2)
    mark = carried.state.mark()
    network(x)
    carried.check(mark.changes(), mark, Batch((x,), {}, True), "a forward in training")
    assert len(network.layer._forward_hooks) == 2
    assert torch.equal(network(x), 2 * nn.functional.linear(x, *network.layer.parameters()))


def test_values_whose_memory_was_given_back_are_not_read():
    """As FSDP2 leaves the weights that `nn.LSTM` keeps in a list."""
    network = Network()
    with Restored(State(network)) as body:
        network.last = gathered = torch.ones(2)
        gathered.untyped_storage().resize_(0)
        left = body.left()
    assert all("last" not in name for name in left)
    assert network.last is None
