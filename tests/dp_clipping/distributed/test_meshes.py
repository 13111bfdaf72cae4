"""Private steps on meshes of one and two axes, beside one process: norms and clipped sums."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.support import zoo
from tests.support.on_ranks import on_ranks


class HeadNorm(nn.Module):
    """A norm over each head, which a rank applies to the heads that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head, self.narrow = (nn.Linear(6, 8), nn.RMSNorm(4), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wide(x).unflatten(-1, (-1, 4))
        return self.narrow(self.head(heads).flatten(-2))


@on_ranks(2)
def test_a_shared_parameter_of_a_part_of_its_input_is_refused(context: Context) -> None:
    """Each rank would hold a term of its gradient, and the norm would be too small."""
    mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=("tensor",))
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    batch = zoo.numbers(4, 5, 6, out=(5, 3))
    for how in NORM_REDUCTIONS:
        for mode in MODES:
            model = private(parallelize_module(HeadNorm(), mesh, plan), mode, norm_reduction=how)
            with pytest.raises(RuntimeError, match="not split over the tensor-parallel axis"):
                private_loss(model, batch, zoo.product).backward()
    network = HeadNorm()
    network.head.requires_grad_(False)
    model = private(parallelize_module(network, mesh, plan), "bookkeeping")
    private_loss(model, batch, zoo.product).backward()
