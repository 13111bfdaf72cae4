"""Which arguments are ids with offsets: seen once, or refused with what to do."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.capture.samples.bags import Bags
from dp_clipping.capture.samples.known_bags import KnownBags
from tests.dp_clipping.capture.samples.test_bags import IDS, OFFSETS, WEIGHTS
from tests.dp_clipping.conftest import private


class Net(nn.Module):
    """Gives its bag what `change` makes of its arguments."""

    def __init__(self, change=lambda *x: x, **options):
        super().__init__()
        self.change, self.head = change, nn.Linear(3, 2)
        self.bag = nn.EmbeddingBag(20, 3, **{"mode": "sum"} | options)

    def forward(self, *args: Tensor):
        return self.head(self.bag(*self.change(*args)))


class Twice(Net):
    def forward(self, ids, offsets, others):
        return self.head(self.bag(ids, offsets) * self.bag(ids, others))


def test_bags_are_known_by_the_structure_of_arguments():
    network = Net()
    known = KnownBags(network)
    assert known.of((IDS, OFFSETS), {}) is None
    known.learn((IDS, OFFSETS), {}, network)
    assert known.of((IDS, OFFSETS), {}) == (Bags(0, 1),)
    assert known.of((IDS[None],), {}) is None
    known.learn((IDS[None],), {}, network)
    assert known.of((IDS[None],), {}) == ()
    known.forget()
    assert known.of((IDS, OFFSETS), {}) is None
    assert KnownBags(nn.Linear(1, 1)).of((IDS,), {}) == ()


REFUSED = {
    "made of the ids": (Net(lambda i, o: (i - 10, o)), (), "its ids are no argument of the model"),
    "made of the offsets": (
        Net(lambda i, o: (i, o.flip(0) * 0)), (), "its offsets are no argument.*forward.self, ids"
    ),
    "weights": (
        Net(lambda i, o: (i, o, torch.rand(6))), (), "its per_sample_weights are no argument"
    ),
    "extremes": (Net(mode="max"), (), "mode 'max'.*use mode='sum' or 'mean'"),
    "rows of ids": (Net(lambda i, o, w: (i, o)), (WEIGHTS,), "numbers for each id as its per_s"),
    "two ways": (Twice(), (OFFSETS.clone() // 2,), "in two ways"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused(name):
    network, more, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        private(network)(IDS, OFFSETS, *more)


def test_a_module_with_a_parameter_of_its_own_is_told_what_to_do():
    network = Net()
    network.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="let those parameters be in a module that"):
        private(network)(IDS, OFFSETS)


def test_a_frozen_layer_takes_offsets_too():
    network = Net(mode="max")
    network.bag.requires_grad_(False)
    assert private(network)(IDS, OFFSETS).shape == (4, 2)
