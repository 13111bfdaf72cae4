"""Which ranks share what: what `sharding_of` finds, and what it refuses."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping import PrivacyEngine
from dp_clipping.distributed.detect import sharding_of
from tests.support import zoo
from tests.support.sharded_steps import shard_fsdp2


def network():
    return zoo.seeded(zoo.transformer)


def ignores_a_parameter(context: Context) -> None:
    model = network()
    left_out = model.blocks[0].attention.query.weight
    mesh = DeviceMesh.from_group(context.group, "cpu")
    fully_shard(model, mesh=mesh, ignored_params={left_out})
    with pytest.raises(ValueError, match=r"told to ignore .*query\.weight"):
        sharding_of(model)
    left_out.requires_grad_(False)
    assert left_out not in sharding_of(model).parts


def lies_on_two_meshes(context: Context) -> None:
    model = network()
    mesh = DeviceMesh.from_group(context.group, "cpu")
    other = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=("other",))
    fully_shard(model.blocks[0], mesh=other)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="sharded over different meshes"):
        sharding_of(model)


def after_a_forward(context: Context) -> None:
    """FSDP2 leaves its root gathered: the optimizer's parameters are the sharded ones."""
    model = network()
    shard_fsdp2(model, "block", DeviceMesh.from_group(context.group, "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = zoo.tokens(2, 6)[0]
    with torch.no_grad():
        model(tokens)
    assert any(p not in set(optimizer.param_groups[0]["params"]) for p in model.parameters())
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2)
    private, *_ = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=optimizer, data_loader=loader,
        criterion=torch.nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode="bookkeeping",
    )  # fmt: skip
    assert private.capture.parameters == optimizer.param_groups[0]["params"]


@pytest.mark.parametrize(
    "body",
    [ignores_a_parameter, lies_on_two_meshes, after_a_forward],
    ids=lambda body: body.__name__,
)
def test_what_is_found(cpu_ranks, body):
    cpu_ranks.run(2, body)
