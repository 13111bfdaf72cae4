"""Sharded private steps on GPUs: fused kernels, NCCL, 16 bit, the collectives' order."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.parallel import parallelize, shard_fully
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.support import zoo
from tests.support.replicas import part
from tests.support.sharded_steps import whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LIMIT = 0.5
ALL = (*MODES, "flash", "flash_bookkeeping")


def transformer() -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(d_model=64, d_ff=96, num_heads=4, num_layers=3))


def one_step(context: Context, axis: str, sixteen_bit: bool) -> None:
    batch = zoo.tokens(5, 40)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    counts = [3, 2] if context.world_size == 2 else [2, 0, 1, 2]
    mine = slice(None) if axis == "tensor" else part(counts, context.rank)
    tolerance = 4e-2 if sixteen_bit else 2e-4
    mesh = init_device_mesh("cuda", (context.world_size,), mesh_dim_names=(axis,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for n, (mode, clipping) in enumerate(product(ALL, ("flat", "per_layer"))):
        expected = oracle.clipped_sum(gradients, LIMIT, clipping)
        network = transformer().to(context.device)
        if sixteen_bit:
            shard_fully(network, mesh, mixed_precision=policy)
        else:
            parallelize(network, mesh)
        how = NORM_REDUCTIONS[n % 3]
        model = private(network, mode, LIMIT, clipping, norm_reduction=how)
        for _ in range(3):
            model.clear_gradients()
            own = oracle.move(oracle.pick(batch, mine), device=context.device)
            private_loss(model, own, zoo.cross_entropy).backward()
            model.finish_synchronization()
        found = model.per_sample_gradient_norms.double().cpu()
        torch.testing.assert_close(found, norms[mine], rtol=tolerance, atol=0)
        size = sum(g.square().sum() for g in expected.values()).sqrt()
        for name, parameter in model.network.named_parameters():
            assert parameter.grad.dtype == torch.float32
            error = (whole(parameter.grad).double().cpu() - expected[name]).norm()
            assert error <= tolerance * size, (mode, clipping, name)


@pytest.mark.parametrize("sixteen_bit", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2(gpu_ranks, ranks, sixteen_bit):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    gpu_ranks.run(ranks, one_step, "data", sixteen_bit)


def test_tensor_parallel(gpu_ranks):
    gpu_ranks.run(2, one_step, "tensor", False)
