"""Clipped sums find their shards: the sum over ranks, in whatever order they come."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dp_clipping.distributed.detect import sharding_of
from dp_clipping.distributed.dtensor import local
from dp_clipping.distributed.gradient_reduce import ShardedSums


def sharded(context) -> tuple[nn.Module, dict]:
    """Two units, of which one has shapes that two ranks do not divide."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    mesh = DeviceMesh.from_group(context.group, "cpu")
    fully_shard(network[1], mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network, {name: p.shape for name, p in network.named_parameters()}


def totals_of(shapes: dict, rank: int) -> dict:
    draw = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def on_ranks(context) -> None:
    network, shapes = sharded(context)
    sharding = sharding_of(network)
    sums, named = ShardedSums(sharding), dict(network.named_parameters())
    mine = totals_of(shapes, context.rank)
    both = [totals_of(shapes, rank) for rank in range(2)]
    orders = [list(named), list(named)[::-1]]
    for name in orders[context.rank]:
        sums.accumulate(named[name], mine[name].clone())
    assert all(p.grad is None for p in named.values())
    sums.finish()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad.full_tensor(), both[0][name] + both[1][name])
    assert not sums.changed()
    for name in named:  # a second microbatch adds
        sums.accumulate(named[name], mine[name].clone())
    sums.finish()
    for name, parameter in named.items():
        total = parameter.grad.full_tensor()
        torch.testing.assert_close(total, 2 * (both[0][name] + both[1][name]))
    for _ in range(2):  # as do two before they are in `.grad`
        for name in named:
            sums.accumulate(named[name], mine[name].clone())
    sums.finish()
    for name, parameter in named.items():
        total = parameter.grad.full_tensor()
        torch.testing.assert_close(total, 4 * (both[0][name] + both[1][name]))
    local(named["0.weight"].grad).add_(1)
    assert sums.changed() == [named["0.weight"]]


def cut_off(context) -> None:
    network, shapes = sharded(context)
    sharding = sharding_of(network)
    sums, named = ShardedSums(sharding), dict(network.named_parameters())
    sums.accumulate(named["1.bias"], torch.ones(shapes["1.bias"]))
    with pytest.raises(RuntimeError, match="sums of some parameters have not arrived"):
        sums.finish()
    sums.forget()
    sums.finish()
    assert all(p.grad is None for p in named.values())


def deferred(context) -> None:
    """What is held back leaves when it is told to."""
    network, shapes = sharded(context)
    sharding = sharding_of(network)
    sums, named = ShardedSums(sharding), dict(network.named_parameters())
    sums.deferred = True
    for name, total in totals_of(shapes, context.rank).items():
        sums.accumulate(named[name], total)
    with pytest.raises(RuntimeError, match="have not arrived"):
        sums.finish()
    sums.launch_ready()
    sums.finish()
    assert all(p.grad is not None for p in named.values())


@pytest.mark.parametrize("body", [on_ranks, cut_off, deferred], ids=lambda body: body.__name__)
def test_shards(cpu_ranks, body):
    cpu_ranks.run(2, body)
