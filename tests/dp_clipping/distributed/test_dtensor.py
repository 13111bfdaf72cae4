"""Helpers for DTensors, and for what FSDP has wrapped."""

import subprocess
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from dp_clipping.distributed.dtensor import (
    is_sharded,
    local,
    owner_of,
    plain_type,
    shard_again,
    size_of,
)
from tests.support.on_ranks import on_ranks


def test_owners():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    assert owner_of(network, "1.0.bias") == (network[1][0], "bias")
    assert owner_of(network[0], "weight") == (network[0], "weight")


def test_plain_tensors():
    x = torch.ones(2)
    assert local(x) is x
    assert not is_sharded(x)
    assert size_of(None) == 1


@on_ranks(2)
def test_sharded_ones(context) -> None:
    mesh = DeviceMesh.from_group(context.group, "cpu")
    x = DTensor.from_local(torch.full((2,), float(context.rank)), mesh, [Shard(0)])
    assert is_sharded(x)
    assert local(x).tolist() == [context.rank] * 2
    assert size_of(context.group) == 2
    network = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), mesh=mesh)
    assert plain_type(network) is nn.Sequential
    assert plain_type(network[1]) is nn.ReLU
    network(torch.ones(1, 4))
    shard_again(network)
    assert all(is_sharded(p) for p in network.parameters())


def test_importing_the_engine_leaves_their_packages_alone():
    program = (
        "import sys\n"
        "from dp_clipping import PrivacyEngine\n"
        "slow = 'torch.distributed.tensor', 'torch.distributed.checkpoint', 'torch._dynamo'\n"
        "print([name for name in slow if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
