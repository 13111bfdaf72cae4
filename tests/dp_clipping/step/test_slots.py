"""Slots of a step in whose network something is compiled."""

import copy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.step import slots
from dp_clipping.step.slots import NODES
from tests.dp_clipping.conftest import assert_close, clipped_sums, private
from tests.support import zoo


class Partly(nn.Module):
    """Its last layer's output is no part of its own, and it adds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beside = (nn.Linear(4, 4) for _ in range(3))
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.beside(x)
        return (self.second(torch.tanh(self.first(x))) * self.shift).sum(1)


def layers() -> nn.Module:
    """Two of them, and nothing that would run under vmap, on which a compiler takes seconds."""
    return zoo.Net(
        lambda net, x: net.second(torch.tanh(net.first(x))).sum(1),
        first=nn.Linear(4, 4), second=nn.Linear(4, 4),
    )  # fmt: skip


BATCH = zoo.numbers(4, 3, 4, out=(4,))


def compiled(network: nn.Module):
    torch.compiler.reset()
    network.compile(backend="eager")
    return private(network, "bookkeeping", 0.5)


def test_clipped_sums_with_a_layer_that_backward_does_not_reach():
    """Also in the second step, in which the parameter whose values a slot has is another one."""
    network, plain = zoo.seeded(Partly), zoo.seeded(Partly)
    model = compiled(network)
    for _ in range(2):
        sums = clipped_sums(model, BATCH, zoo.product)
        gradients = oracle.per_sample_gradients(plain, BATCH, zoo.product)
        assert_close(sums, oracle.clipped_sum(gradients, 0.5), 4e-5)
        for one in (network, plain):
            one.shift.data = one.shift.data * 3
            one.zero_grad()


def test_what_slots_are_is_found_once_for_a_batch_size():
    model = compiled(zoo.seeded(layers))
    with patch.object(slots, "_new_layout", wraps=slots._new_layout) as new:
        for batch_size, calls in ((4, 1), (4, 1), (3, 2), (4, 2)):
            clipped_sums(model, [x[:batch_size] for x in BATCH], zoo.product)
            assert new.call_count == calls
        model.reset_batch_layouts()
        clipped_sums(model, BATCH, zoo.product)
        assert new.call_count == 3


def test_a_weight_that_backward_does_not_reach_is_not_among_those_used():
    """Else the count of uses would be too small, and all samples would be left out."""
    found = []
    step = SimpleNamespace(counted=lambda *counted: found.append(counted), take=None)
    ctx = SimpleNamespace(rest=(step, slots.Node(counted={"reached": 1, "not reached": 2})))
    slots.SlotNode.backward(ctx, count := torch.ones(1), torch.zeros(1), None)
    assert found == [(frozenset(["reached", "not reached"]), count, 1)]


def test_another_backward_is_refused():
    model = compiled(zoo.seeded(layers))
    clipped_sums(model, BATCH, zoo.product)
    with pytest.raises(RuntimeError, match=r"^second.bias: backward of"):
        model(BATCH[0]).sum().backward()


@pytest.mark.parametrize("sharding", [None, "some"])
def test_layers_of_a_node(sharding):
    """A node has no more than a part of all parameters, or one layer, as on ranks every one."""
    sizes = (100, 3, 4, 5, 6, 7, 8, 9, 1, 300, 30, 30, 30)
    records = [SimpleNamespace(shape=torch.Size([n])) for n in sizes]
    handles = [SimpleNamespace(records={"weight": one}) for one in records]
    capture = SimpleNamespace(
        network=nn.Module(), handles=handles, trained=records, sharding=sharding
    )
    nodes = list(slots._dealt(capture))
    assert [handle for node in nodes for handle in node] == handles
    found = [[handle.records["weight"].shape[0] for handle in node] for node in nodes]
    assert all(len(own) == 1 or sum(own) <= sum(sizes) / NODES for own in found)
    if sharding is None:
        assert found == [[100], [3, 4, 5, 6, 7, 8, 9, 1], [300], [30, 30], [30]]
    else:
        assert len(found) == len(sizes)


@pytest.mark.parametrize("blocks", [3, 12])
def test_blocks_of_one_class_are_compiled_once(blocks):
    """Which of a block's slots are one tensor is the same in each: the compiler looks at that."""
    layers = [nn.Linear(5, 5) for _ in range(4)]
    network = nn.Sequential(
        nn.Linear(3, 5), *(nn.Sequential(*copy.deepcopy(layers)) for _ in range(blocks))
    )
    for block in network[1:]:
        block.compile(backend="eager")
    nodes = list(slots._dealt(private(network, "bookkeeping", 0.5).capture))
    number = {handle.name: n for n, node in enumerate(nodes) for handle in node}
    alike = set()
    for n in range(1, blocks + 1):
        own = [number[f"{n}.{k}"] for k in range(4)]
        alike.add(tuple(one - own[0] for one in own))
    assert len(alike) == 1
    assert len(nodes) > 2
