"""Private steps under tensor parallelism, alone and on a mesh with FSDP2, beside one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dp_clipping.norm_reduce import NORM_REDUCTIONS
from lm.parallel import parallelize
from tests.dp_clipping import oracle, zoo
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.dp_clipping.sharded import whole
from tests.ranks import Context

LIMIT = 0.5
SPLIT = [3, 0]  # samples of each data rank: one has none


def transformer() -> nn.Module:
    return zoo.seeded(zoo.transformer).double()


def mesh_of(context: Context) -> tuple[DeviceMesh, slice]:
    """Two ranks are a tensor axis, four a data and a tensor axis; and this rank's samples."""
    if context.world_size == 2:
        names = ("tensor",)
        return DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=names), slice(0, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    first = sum(SPLIT[: mesh.get_local_rank("data")])
    return mesh, slice(first, first + SPLIT[mesh.get_local_rank("data")])


def one_step(context: Context, wrap: str = "block") -> None:
    batch = zoo.tokens(3, 6)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    mesh, mine = mesh_of(context)
    for n, mode in enumerate(MODES):
        for k, clipping in enumerate(("flat", "per_layer")):
            expected = oracle.clipped_sum(gradients, LIMIT, clipping)
            how = NORM_REDUCTIONS[(n + k) % 3]
            network = parallelize(transformer(), mesh, wrap=wrap)
            model = private(network, mode, LIMIT, clipping, norm_reduction=how)
            for _ in range(2):
                model.clear_gradients()
                private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
                model.finish_synchronization()
                found = model.per_sample_gradient_norms
                torch.testing.assert_close(found.double(), norms[mine], rtol=1e-6, atol=0)
                for name, parameter in model.network.named_parameters():
                    total = whole(parameter.grad)
                    torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_and_sums(cpu_ranks, ranks):
    cpu_ranks.run(ranks, one_step)
