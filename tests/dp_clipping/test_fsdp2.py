"""FSDP2 with every mode: norms and clipped sums are those of one process in float64."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.dp_clipping import oracle, zoo
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.dp_clipping.replicas import build, train
from tests.dp_clipping.sharded import WRAPS, shard_fsdp2, whole
from tests.ranks import Context

LIMIT = 0.5
SPLITS = {2: [3, 2], 4: [2, 0, 1, 2]}  # samples of each rank: unequal, one without any


def transformer() -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(d_ff=23)).double()  # 23 rows on 2 or 4 ranks


def one_step(context: Context, wrap: str) -> None:
    counts = SPLITS[context.world_size]
    batch = zoo.tokens(sum(counts), 6)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    first = sum(counts[: context.rank])
    mine = slice(first, first + counts[context.rank])
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    for mode in MODES:
        for clipping in ("flat", "per_layer"):
            expected = oracle.clipped_sum(gradients, LIMIT, clipping)
            model = private(shard_fsdp2(transformer(), wrap, mesh), mode, LIMIT, clipping)
            for _ in range(2):
                model.clear_gradients()
                private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
                model.finish_synchronization()
                found = model.per_sample_gradient_norms
                torch.testing.assert_close(found.double(), norms[mine], rtol=1e-7, atol=0)
                for name, parameter in model.network.named_parameters():
                    total = whole(parameter.grad)
                    torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_norms_and_sums(cpu_ranks, world_size, wrap):
    cpu_ranks.run(world_size, one_step, wrap)


# ---- through the front door ----------------------------------------------------------------------


def sharded(context: Context, wrap: str = "block", **options):
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    return lambda network: shard_fsdp2(network, wrap, mesh, **options)


def values(run) -> list[torch.Tensor]:
    return [whole(p).detach().clone() for p in run.model.network.parameters()]


def trained(context: Context, mode: str, microbatch: int | None) -> list[torch.Tensor]:
    """Parameters after some steps, and the same ones on every rank."""
    run = build(context, shard=sharded(context), name="transformer", grad_sample_mode=mode)
    train(run, 4, microbatch)
    return values(run)


@pytest.mark.parametrize(("mode", "microbatch"), [("bookkeeping", None), ("ghost", 1)])
def test_training_is_that_of_one_process(cpu_ranks, mode, microbatch):
    """Draws, noise of each shard, momentum: nothing tells how many ranks there are."""
    alone = build(name="transformer", grad_sample_mode=mode)
    train(alone, 4)
    for found in cpu_ranks.run(2, trained, mode, microbatch):
        for one, other in zip(found, values(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
