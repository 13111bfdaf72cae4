"""Which arguments are ids with offsets: seen once, or refused with what to do."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.capture.samples.bags import Bags, KnownBags
from dp_clipping.capture.samples.trees import opened
from tests.dp_clipping.capture.samples.test_bags import IDS, OFFSETS, WEIGHTS
from tests.dp_clipping.conftest import criterion_of, private
from tests.support import zoo


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
    known = KnownBags(network, opened)
    assert known.of((IDS, OFFSETS), {}) is None
    known.learn((IDS, OFFSETS), {}, network)
    assert known.of((IDS, OFFSETS), {}) == (Bags(0, 1),)
    assert known.of((IDS[None],), {}) is None
    known.learn((IDS[None],), {}, network)
    assert known.of((IDS[None],), {}) == ()
    known.forget()
    assert known.of((IDS, OFFSETS), {}) is None
    assert not KnownBags(nn.Linear(1, 1), opened).modules


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


def test_two_bags_for_each_sample_are_refused():
    with pytest.raises(ValueError, match="one bag for each sample, and several bags of a sample"):
        private(zoo.Net(
            lambda net, ids, offsets: net.head(net.bag(ids, offsets).view(-1, 6)),
            bag=nn.EmbeddingBag(20, 3, mode="sum"), head=nn.Linear(6, 2),
        ))(IDS, OFFSETS)  # fmt: skip


class TwoBags(nn.Module):
    """As the message says, and numbers beside them."""

    def __init__(self):
        super().__init__()
        self.one = nn.EmbeddingBag(20, 3, mode="sum")
        self.other = nn.EmbeddingBag(20, 3, mode="mean")
        self.head = nn.Linear(7, 2)

    def forward(self, ids, offsets, others, starts, numbers):
        bags = self.one(ids, offsets), self.other(others, starts)
        return self.head(torch.cat((*bags, numbers), 1))


def test_bags_in_two_arguments_and_numbers():
    torch.manual_seed(0)
    network = TwoBags().double()
    others, starts = torch.randint(20, (9,)), torch.tensor([0, 4, 5, 9])
    numbers, y = torch.randn(2, 4, 1, dtype=torch.float64).unbind(0)
    model = private(copy.deepcopy(network))
    outputs = model(IDS, OFFSETS, others, starts, numbers)
    criterion_of(model, zoo.product)(outputs, y.expand(4, 2)).backward()
    expected = []
    for n in range(4):
        bags = []
        for ids, offsets in ((IDS, OFFSETS), (others, starts)):
            ends = [*offsets.tolist(), len(ids)]
            bags += [ids[ends[n] : ends[n + 1]], torch.tensor([0])]
        loss = (network(*bags, numbers[n : n + 1]) * y[n]).sum()
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        expected.append(sum(g.square().sum() for g in gradients).sqrt())
    torch.testing.assert_close(
        model.per_sample_gradient_norms.double(), torch.stack(expected), rtol=1e-6, atol=1e-7
    )
