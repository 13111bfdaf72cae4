"""Layers that read one input share its Gram matrix, unless ranks count their norms differently."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.planning.cost_model import ACCUMULATE, LayerPlan
from dp_clipping.step.fused.norm_queue import NormQueue
from dp_clipping.verification import reference as oracle
from lm.rank_pool import Context
from tests.dp_clipping.conftest import private, trained
from tests.support.sharded_steps import one_step


class Router(nn.Module):
    """A split layer and a whole one read the same input; either comes first in backward."""

    def __init__(self, replicated_first: bool):
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.router = nn.Linear(8, 8, bias=False)
        self.replicated_first = replicated_first
        with torch.no_grad():  # ranks' halves have equal norms: no contrast between them shows
            self.up.weight[8:] = self.up.weight[:8]
            self.down.weight[:, 8:] = self.down.weight[:, :8]

    def forward(self, x):
        x = torch.tanh(self.into(x))
        if self.replicated_first:
            split = self.down(torch.tanh(self.up(x)))
            return split + self.router(x)
        whole = self.router(x)
        return self.down(torch.tanh(self.up(x))) + whole


def product_with(outputs, targets):
    return (outputs * targets).flatten(1).sum(1)


def check_router(context: Context, replicated_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(3, 6, 8, generator=generator) for _ in range(2))
    gradients = oracle.per_sample_gradients(Router(replicated_first), batch, product_with)
    network = Router(replicated_first)
    mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=("tensor",))
    parallelize_module(network, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = private(
        network, "flash_bookkeeping", 1.0, policy={"norm_algorithm": "width", "tile_size": 16}
    )
    one_step(model, batch, product_with)
    norms = model.per_sample_gradient_norms
    torch.testing.assert_close(norms.double(), oracle.norms(gradients), rtol=1e-4, atol=0)
    assert model.step_context.plans.last is not None  # on kernels


@pytest.mark.parametrize("replicated_first", [True, False])
def test_split_and_replicated_layers_of_one_input(interpreter, replicated_first):
    interpreter.ranks.run(2, check_router, replicated_first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_one_token_are_products_of_norms(dtype):
    """No sample's gradient is formed for them, on kernels or off."""
    y, a = torch.randn(5, 1, 20).to(dtype), torch.randn(5, 1, 30).to(dtype)
    y[1], a[2] = 0, 1e30  # the second one's square is infinite: it is left out by the coefficient
    weight, queue = trained(nn.Parameter(torch.empty(20, 30))), NormQueue(None)
    choice = LayerPlan(ACCUMULATE, 0.0, 0)
    queue.linear.append((weight, LinearFactors(a, y, False), choice))
    found = queue.flush(True, lambda *_: nullcontext()).norms[weight]
    expected = torch.einsum("btd,btp->bdp", y.double(), a.double()).flatten(1).norm(dim=1)
    expected[2] = torch.inf
    torch.testing.assert_close(found.squared.sqrt().double(), expected, rtol=1e-6, atol=0)
    assert found.squared.dtype == torch.float32
