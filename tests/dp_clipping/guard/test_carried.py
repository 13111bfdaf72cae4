"""State that is carried from one batch to the next is refused by name."""

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
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.last = self.average = None

    def forward(self, x):
        return self.layer(x)


class KeepsTheLast(Network):
    def forward(self, x):
        self.last = x.detach()
        return self.layer(x)


class Averages(Network):
    def forward(self, x):
        mean = x.detach().mean()
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return self.layer(x) * self.average


class Counts(Network):
    def forward(self, x):
        self.count += 1
        return self.layer(x)


class Hooked(Network):
    """Registers a hook in the first forward, and notes that it has, as Hugging Face's models do."""

    def forward(self, x):
        if self.last is None:
            self.last = True
            self.layer.register_forward_hook(lambda module, args, y: 2 * y)
        return self.layer(x)


def step(network: nn.Module) -> None:
    carried = Carried(State(network), network, partial(Batch, batch_first=True))
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    mark = carried.state.mark()
    network(x)
    if changes := mark.changes():
        carried.check(changes, mark, Batch((x,), {}, True), "a forward in training")


@pytest.mark.parametrize("kind", [Network, KeepsTheLast, Hooked])
def test_what_depends_on_its_own_batch_alone_is_taken(kind):
    step(kind())


def test_a_moving_average_is_refused():
    with pytest.raises(ValueError, match=r"carried into the next, in .*average"):
        step(Averages())


def test_a_buffer_that_changes_is_refused():
    with pytest.raises(ValueError, match="a forward in training changes count: a parameter or"):
        step(Counts())


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
    step(network)
    assert len(network.layer._forward_hooks) == 2
    before = network(torch.ones(1, 2))
    assert torch.equal(
        before, 2 * nn.functional.linear(torch.ones(1, 2), *network.layer.parameters())
    )


def test_values_whose_memory_was_given_back_are_not_read():
    """As FSDP2 leaves the weights that `nn.LSTM` keeps in a list."""
    network = Network()
    with Restored(State(network)) as body:
        network.last = gathered = torch.ones(2)
        gathered.untyped_storage().resize_(0)
        left = body.left()
    assert all("last" not in name for name in left)
    assert network.last is None
