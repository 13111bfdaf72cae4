"""Which parameters lie together, and when they have memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddp.sharded.internals.blocks import parameters_by_block
from ddp.sharded.internals.stand_in import StandIn
from ddp.sharded.units import GatheredUnit
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network
from tests.support.on_ranks import on_ranks


def names_by_block(network: nn.Module, classes=None) -> dict[str, list[str]]:
    found = parameters_by_block(network, classes)
    return {block: list(parameters.values()) for block, parameters in found.items()}


def test_blocks_are_members_of_module_lists_or_of_chosen_classes():
    """A block of blocks has what is in none of them."""
    found = names_by_block(Network(depth=2))
    assert list(found) == ["", "blocks.0", "blocks.1"]
    assert found[""] == ["embedding.weight", "head.weight"]
    assert found["blocks.1"][:2] == ["blocks.1.0.weight", "blocks.1.0.bias"]
    assert list(names_by_block(Network(depth=1), (nn.Linear,))) == [
        "", "blocks.0.0", "blocks.0.2", "head"
    ]  # fmt: skip
    inner = nn.Module()
    inner.experts = nn.ModuleList([nn.Linear(2, 2)])
    inner.gate = nn.Linear(2, 1)
    outer = nn.Module()
    outer.blocks = nn.ModuleList([inner])
    found = names_by_block(outer)
    assert list(found) == ["", "blocks.0.experts.0", "blocks.0"]
    assert found["blocks.0"] == ["blocks.0.gate.weight", "blocks.0.gate.bias"]


def test_what_is_in_two_blocks_belongs_to_the_network():
    """Shared parameters, a layer in two places, and not a block that is called twice."""
    network = Network(depth=3)
    network.blocks[1][0] = network.blocks[0][0]  # in two blocks
    network.extra = network.blocks[1][3]  # in a block and outside
    network.blocks[2] = network.blocks[0]  # a block that is called twice
    network.last = network.blocks[0]
    network.blocks[1][2].weight = network.head.weight
    found = names_by_block(network)
    assert list(found) == ["", "blocks.0", "blocks.1"]
    assert found[""] == [
        "embedding.weight", "blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.2.weight",
        "blocks.1.3.weight", "blocks.1.3.bias",
    ]  # fmt: skip


@on_ranks(2)
def test_memory_comes_and_goes(context: Context) -> None:
    values = torch.arange(15.0).view(3, 5) + 1
    parameters = [nn.Parameter(values.clone()), nn.Parameter(values[0].clone())]
    names = dict(zip(parameters, ["weight", "bias"], strict=True))
    unit = GatheredUnit(names, context.group, torch.bfloat16, "block")
    for _ in range(2):
        assert unit.values.untyped_storage().size() == 0
        assert isinstance(parameters[0], StandIn)
        assert parameters[0].untyped_storage().size() == 2
        unit.start()
        assert unit.values.untyped_storage().size() == unit.values.nbytes
        unit.wait()
        transposed = parameters[0].detach().t()
        assert torch.equal(transposed.float(), values.t())
        unit.free()
    unit.shard.mul_(2)
    unit.start()
    unit.wait()
    assert torch.equal(transposed.float(), 2 * values.t()), "a view that autograd saved"
    assert parameters[0]._version == 0
    assert unit.shard.dtype == torch.float32


@on_ranks(2)
def test_a_gather_that_has_failed_raises_once(context: Context) -> None:
    """It raises once: what frees blocks afterwards does not, and a later gather begins anew.

    A wait that was interrupted goes on, since other ranks gather no second time.
    """
    parameter = nn.Parameter(torch.arange(6.0))
    unit = GatheredUnit({parameter: "weight"}, context.group, torch.float32, "block")

    def fail(wait: Callable[[], Any], _what: str, _block: str) -> None:
        wait()
        raise RuntimeError("a rank has gone")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    unit.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp.sharded.units.noted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            unit.wait()
        assert unit.has_memory
        patch.setattr("ddp.sharded.units.noted", fail)
        with pytest.raises(RuntimeError, match="has gone"):
            unit.wait()
        unit.free()
    assert isinstance(parameter, StandIn)
    unit.start()
    unit.wait()
    assert parameter.tolist() == [0, 1, 2, 3, 4, 5]
    unit.free()
    assert unit.values.untyped_storage().size() == 0
