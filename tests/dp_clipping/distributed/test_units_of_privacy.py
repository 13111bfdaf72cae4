"""`examples_per_unit` on several ranks: norms and sums are those of one process and of units."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddp import wrap
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from experiments.verify_correctness import reference as oracle
from lm.parallel import DATA, TENSOR, parallelize
from lm.rank_pool import Context
from tests.dp_clipping.conftest import MODES, private, skip_all_checks
from tests.dp_clipping.distributed import test_fsdp1, test_fsdp2
from tests.support import zoo
from tests.support.meshes import square
from tests.support.replicas import build, part, train
from tests.support.sharded_steps import LIMIT, Shard, one_step, whole, whole_gradients

K = 2
IDS = [i // 3 if i < 12 else i - 8 for i in range(24)]  # 4 units of 3 examples, 12 of one


def transformer() -> nn.Module:
    return zoo.seeded(zoo.transformer).double()


def split(context: Context, network: nn.Module) -> nn.Module:
    """Tensor parallel on all ranks."""
    mesh = DeviceMesh.from_group(context.group, context.device.type, mesh_dim_names=(TENSOR,))
    return parallelize(network, mesh)


def on_a_mesh(context: Context, network: nn.Module) -> nn.Module:
    """FSDP2 along one axis of a mesh, tensor parallel along the other."""
    return parallelize(network, square(DATA, TENSOR))


def bucketed(context: Context, network: nn.Module) -> nn.Module:
    return wrap("ddp_bucketed", network, process_group=context.group)


SHARDS = {
    "ddp_bucketed": bucketed,
    "fsdp2 leaf": partial(test_fsdp2.sharded, wrap="leaf"),
    "fsdp2 block": test_fsdp2.sharded,
    "fsdp2 root": test_fsdp2.at_the_root,
    "fsdp1": test_fsdp1.sharded,
    "tensor": split,
    "mesh": on_a_mesh,
}


def units_on_ranks(context: Context, name: str, counts: list[int], share: int, clipping: str):
    """Compares two steps with each unit's gradient, summed example by example in float64.

    Args:
        counts: units of each data-parallel rank.
        share: ranks that have the same units.
    """
    batch = zoo.tokens(K * sum(counts), 6)
    each = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    gradients = oracle.unit_gradients(each, K)
    norms = oracle.norms(gradients)
    assert (norms > LIMIT).any()
    expected = oracle.clipped_sum(gradients, LIMIT, clipping)
    units = part(counts, context.rank // share)
    mine = slice(K * units.start, K * units.stop)
    for mode, reduction in zip(MODES, NORM_REDUCTIONS, strict=True):
        network = SHARDS[name](context, transformer())
        options = {"examples_per_unit": K, "norm_reduction": reduction}
        model = private(network, mode, LIMIT, clipping, **options)
        if mode != MODES[0]:  # samples that see each other are looked for in one mode
            skip_all_checks(model)
        for _ in range(2):
            model.clear_gradients()
            one_step(model, oracle.pick(batch, mine), zoo.cross_entropy)
            found = model.per_sample_gradient_norms.double()
            torch.testing.assert_close(found, norms[units], rtol=1e-5, atol=0)
            sums = whole_gradients(model)
            assert list(sums) == list(expected)
            for own, total in sums.items():
                torch.testing.assert_close(total.double(), expected[own], rtol=1e-4, atol=1e-6)


# Each layout with one style in the fast suite, each style with data and with model parallelism.
FLAT = {"ddp_bucketed", "fsdp2 leaf", "fsdp2 root", "fsdp1"}
COVERED = {(name, "flat" if name in FLAT else "per_layer") for name in SHARDS}


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        pytest.param(*both, marks=[] if both in COVERED else [pytest.mark.slow])
        for both in product([name for name in SHARDS if name != "mesh"], ["flat", "per_layer"])
    ],
)
def test_norms_and_sums(cpu_ranks, name, clipping):
    counts, share = ([3], 2) if name == "tensor" else ([2, 1], 1)
    cpu_ranks.run(2, units_on_ranks, name, counts, share, clipping)


def test_norms_and_sums_on_a_mesh(cpu_ranks):
    cpu_ranks.run(4, units_on_ranks, "mesh", [2, 1], 2, "flat")


def test_a_rank_without_units(cpu_ranks):
    cpu_ranks.run(2, units_on_ranks, "fsdp2 block", [3, 0], 1, "flat")


# ---- through the front door ----------------------------------------------------------------------

OPTIONS = {"name": "transformer", "batch_size": 6, "examples_per_unit": 3, "unit_ids": IDS}


def trained(
    context: Context | None, shard: Shard | None, microbatch: int | None, pad: bool, follows: bool
) -> list[Tensor]:
    """Parameters, and C, after four steps; C follows the norms of units, if it `follows`."""
    own: Callable | None = None if shard is None else partial(shard, context)
    given = {"expected_batch_size": 2, "quantile": 0.4, "count_std": 6.0}
    threshold = AdaptiveThreshold(0.7, **given) if follows else None
    run = build(context, shard=own, **OPTIONS, adaptive_threshold=threshold)
    train(run, 4, microbatch, pad=pad)
    c = torch.tensor(run.optimizer.max_grad_norm)
    return [c, *(whole(p).detach().clone() for p in run.model.network.parameters())]


@pytest.mark.parametrize(
    ("name", "microbatch", "pad", "follows"),
    [
        ("ddp_bucketed", 3, True, False),
        ("fsdp2 block", None, False, True),
        ("fsdp2 block", 6, True, False),
        ("fsdp1", 3, False, True),
        ("tensor", 3, True, False),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                ("ddp_bucketed", None, False, True),
                ("fsdp2 block", 3, False, False),
                ("tensor", None, False, True),
            )
        ),
    ],
)
def test_training_is_that_of_one_process(cpu_ranks, name, microbatch, pad, follows):
    alone = trained(None, None, None, False, follows)
    assert (alone[0] == 0.7) != follows
    shard = None if name == "ddp_bucketed" else SHARDS[name]
    for found in cpu_ranks.run(2, trained, shard, microbatch, pad, follows):
        if name == "fsdp1":
            found, alone = found[:1], alone[:1]
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def drawn(context: Context, name: str) -> list[list[list[int]]]:
    shard = None if name == "ddp_bucketed" else partial(SHARDS[name], context)
    return train(build(context, shard=shard, **OPTIONS, sample_rate=0.5, steps=6), 6)


@pytest.mark.parametrize("name", ["ddp_bucketed", "fsdp2 block", "tensor"])
def test_a_unit_is_on_one_rank_with_all_of_its_examples(cpu_ranks, name):
    ranks = cpu_ranks.run(2, drawn, name)
    for steps in zip(*ranks, strict=True):
        seen = [{IDS[i] for piece in step for i in piece} for step in steps]
        for units, step in zip(seen, steps, strict=True):
            examples = {i for piece in step for i in piece}
            assert examples == {i for i, unit in enumerate(IDS) if unit in units}
        assert seen[0] == seen[1] if name == "tensor" else not seen[0] & seen[1]
    assert any(step[0] for step in ranks[0])
