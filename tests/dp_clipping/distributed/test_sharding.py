"""How a model is spread over ranks: units, bytes, and what stands for a parameter."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

from dp_clipping.distributed.detect import sharding_of
from dp_clipping.distributed.sharding import ParameterPart, Sharding
from tests.support.on_ranks import on_ranks


def test_units_and_their_bytes():
    one, two, three = (Parameter(torch.zeros(n)) for n in (1, 2, 3))
    parts = {p: ParameterPart(p.shape, unit) for p, unit in ((one, 0), (two, 1), (three, 0))}
    sharding = Sharding("x", None, None, None, None, None, parts)
    assert sharding.units == {0: [one, three], 1: [two]}
    assert sharding.unit_bytes == {0: 16, 1: 8}
    assert sharding.bytes == 24
    assert sharding.recover()
    x = torch.ones(1)
    assert sharding.like(one, x) is x
    assert not sharding.stands_for(x, one)


@on_ranks(2)
def test_what_fsdp2_has_sharded(context) -> None:
    mesh = DeviceMesh.from_group(context.group, "cpu")
    network = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh=mesh)
    sharding = sharding_of(network)
    weight = network[0].weight
    part = sharding.parts[weight]
    assert (part.shape, part.dim, part.split) == (torch.Size([4, 4]), 0, False)
    assert sharding.tensor_group is None
    for _ in range(2):  # the second time by the layout that was found
        made = sharding.like(weight, torch.full((2, 4), float(context.rank)))
        assert made.placements == weight.placements
        assert made.full_tensor()[:, 0].tolist() == [0, 0, 1, 1]
    network(torch.ones(1, 4))
    assert sharding.stands_for(network[0].weight, weight)
    assert not sharding.stands_for(None, weight)
