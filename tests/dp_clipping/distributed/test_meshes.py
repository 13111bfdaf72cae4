"""Private steps on meshes of one and two axes, beside one process: norms and clipped sums."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from experiments.verify_correctness import reference as oracle
from lm.parallel import parallelize
from lm.rank_pool import Context
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.support import zoo
from tests.support.meshes import square
from tests.support.sharded_steps import (
    EVERY,
    FEW,
    LIMIT,
    MOST,
    check_steps,
    check_sums,
    one_step,
    shard_fsdp2,
)

SPLIT = [3, 0]  # samples of each data rank: one has none


def transformer() -> nn.Module:
    """Of one block: several are in the tests of each FSDP."""
    return zoo.seeded(lambda: zoo.transformer(num_layers=1)).double()


def layout(context: Context, how: str) -> tuple[Callable[[], nn.Module], dict, slice]:
    """What makes the network of a layout, the options that go with it, and this rank's samples."""
    if how == "tensor":
        mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=("tensor",))
        return lambda: parallelize(transformer(), mesh), {}, slice(0, 3)
    outer = "replica" if how == "hybrid" else "data"
    inner = "data" if how == "hybrid" else "tensor"
    mesh = square(outer, inner)
    counts, place = (SPLIT, mesh.get_local_rank("data"))
    if how == "hybrid":
        counts, place = [1, 0, 2, 0], context.rank
    mine = slice(sum(counts[:place]), sum(counts[: place + 1]))
    if how == "data x tensor":
        options = {"data_parallel_group": mesh["data"].get_group()}
        return lambda: parallelize(transformer(), mesh["tensor"]), options, mine
    if how == "hybrid":
        return lambda: shard_fsdp2(transformer(), "block", mesh), {}, mine
    return lambda: parallelize(transformer(), mesh), {}, mine


def steps(context: Context, how: str, runs) -> None:
    make, options, mine = layout(context, how)
    # Norms travel in float32 where a sample's are on several ranks.
    check_steps(make, transformer(), zoo.tokens(3, 6), mine, runs, 1e-6, looks=True, **options)


@pytest.mark.parametrize(
    ("how", "runs"),
    [("tensor", MOST), ("data x tensor", FEW), ("fsdp2 x tensor", FEW), ("hybrid", FEW)],
)
def test_norms_and_sums(cpu_ranks, how, runs):
    cpu_ranks.run(2 if how == "tensor" else 4, steps, how, runs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tensor", "data x tensor", "fsdp2 x tensor", "hybrid"])
def test_norms_and_sums_of_every_mode(cpu_ranks, how):
    cpu_ranks.run(2 if how == "tensor" else 4, steps, how, EVERY)


class HeadNorm(nn.Module):
    """A norm over each head, which a rank applies to the heads that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head, self.narrow = (
            nn.Linear(6, 8),
            nn.RMSNorm(4),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wide(x).unflatten(-1, (-1, 4))
        return self.narrow(self.head(heads).flatten(-2))


def partly_shared(context: Context) -> None:
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


def test_a_shared_parameter_of_a_part_of_its_input_is_refused(cpu_ranks):
    """Each rank would hold a term of its gradient, and the norm would be too small."""
    cpu_ranks.run(2, partly_shared)


def frozen_parts(context: Context) -> None:
    """Only what every tensor rank has whole is trained: they still see the same samples."""

    def build() -> nn.Module:
        network = transformer()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_("norm" in name)
        return network

    mesh = square("data", "tensor")
    place = mesh.get_local_rank("data")
    batch, mine = zoo.tokens(3, 6), slice(2 * place, 2 * place + 2)
    gradients = oracle.per_sample_gradients(build(), batch, zoo.cross_entropy)
    expected = oracle.clipped_sum(gradients, LIMIT)
    model = private(parallelize(build(), mesh), "bookkeeping", LIMIT)
    assert dist.get_world_size(model.sharding.tensor_group) == 2
    assert dist.get_world_size(model.sharding.everyone) == 4
    one_step(model, oracle.pick(batch, mine), zoo.cross_entropy)
    found = model.per_sample_gradient_norms
    torch.testing.assert_close(found, oracle.norms(gradients)[mine], rtol=1e-6, atol=0)
    check_sums(model, expected)


def test_frozen_parts_are_parts_all_the_same(cpu_ranks):
    cpu_ranks.run(4, frozen_parts)
