"""Norms over ranks: where they add up, where they must not, and that every rank has the same."""

import math
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS, NormReducer, refuse_split_samples
from tests.support.on_ranks import on_ranks

GROUPS = 2  # clipping groups


@cache
def square(*, names: tuple[str, str]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The axes of a 2 x 2 mesh, on all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return mesh.get_group(names[0]), mesh.get_group(names[1])


def axes_of(context: Context, mesh: str) -> dict:
    if mesh == "data x tensor":
        data, tensor = square(names=("data", "tensor"))
        return {"data_parallel_group": data, "tensor_group": tensor}
    return {"tensor_group" if "tensor" in mesh else "data_parallel_group": context.group}


def reducer_of(context: Context, mesh: str, mode: str = "sync", dtype=torch.float64):
    return NormReducer(**axes_of(context, mesh), mode=mode, dtype=dtype, device=context.device)


@on_ranks(2)
def test_norms_of_different_samples_are_not_summed(context: Context) -> None:
    reducer = reducer_of(context, "data", "async")
    assert not reducer.splits_parameters
    own = torch.rand(2, GROUPS, 3 + context.rank, dtype=torch.float64) + context.rank
    assert torch.equal(reducer.reduce(own).wait(), own)


@pytest.mark.parametrize("every", [1, 3, 4, 99])
@on_ranks(2)
def test_chunks_do_not_depend_on_what_arrives(context: Context, every: int) -> None:
    """Parameters that backward did not reach arrive on no rank, others on some ranks only."""
    reducer = reducer_of(context, "tensor", "layerwise")
    order = [f"p{number}" for number in range(10)]
    reached = [k for k in order if k != "p4" and (k != "p7" or context.rank)]

    def table(keys):
        values = torch.zeros(1, 1, 2, dtype=torch.float64)
        for key in keys:
            values += torch.tensor([1.0, 2.0]) * 2.0 ** int(key[1:])
        return values

    sums = reducer.layerwise(order, table, every=every)
    for key in reversed(reached):
        sums.add(key)
    assert sums.launched == 4 // every, "the chunk of p4 and all after it are held back"
    expected = 2.0 * (2**10 - 1 - 2**4) - 2**7
    assert sums.wait().tolist() == [[[expected, 2 * expected]]]
    assert sums.launched == -(-10 // every)
    with pytest.raises(AssertionError, match="after its chunk was launched"):
        sums.add("p4")
    with pytest.raises(AssertionError, match="twice"):
        sums.add("p1")


@on_ranks(2)
def test_an_empty_batch_communicates_nothing(context: Context) -> None:
    none = torch.zeros(2, 1, 0, dtype=torch.float64)
    for mode in NORM_REDUCTIONS:
        reducer = reducer_of(context, "tensor", mode)
        assert reducer.reduce(none).wait().shape == none.shape
        assert reducer.layerwise([], lambda keys: none).wait().shape == none.shape


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_so_on_every_rank(context: Context) -> None:
    own = torch.tensor([[[1.0, 2.0, 3.0]]])
    if context.rank:
        own[0, 0, 0], own[0, 0, 2] = torch.inf, torch.nan
    for mode in ("sync", "async"):
        reducer = reducer_of(context, "tensor", mode, torch.float32)
        found = reducer.reduce(own).wait()[0, 0].tolist()
        assert found[0] == torch.inf
        assert found[1] == 4
        assert found[2] != found[2]


@on_ranks(4)
def test_tensor_ranks_have_the_same_samples(context: Context) -> None:
    reducer = reducer_of(context, "data x tensor")
    own = torch.ones(1, 3 if context.rank else 2)  # rank 1 is its tensor-parallel partner
    with pytest.raises(RuntimeError, match="must sample the same batches"):
        reducer.gather(own)


@on_ranks(2)
def test_other_samples_on_a_tensor_axis_show_in_the_losses(context: Context) -> None:
    own = torch.tensor([0.1, 2.0, math.nan, 1e4]) * (1 + 1e-6 * context.rank)
    for axis in ("tensor_group", "data_parallel_group"):
        NormReducer(**{axis: context.group}).check_same_samples(own)
        NormReducer(**{axis: context.group}).check_same_samples(own[:0])
    own[1] += 0.1 * context.rank
    NormReducer(data_parallel_group=context.group).check_same_samples(own)
    with pytest.raises(RuntimeError, match="different losses for what should be the same samples"):
        NormReducer(tensor_group=context.group).check_same_samples(own)


@pytest.mark.parametrize(
    ("what", "placement", "features"),
    [
        ("input", Shard(1), 1),
        ("output", Shard(0), 1),
        ("input", Shard(-2), 1),
        ("input", Shard(1), 0),
    ],
)
def test_split_samples_are_refused(what, placement, features):
    shape = (4, 6, 8) if features else (4, 6)
    with pytest.raises(ValueError, match=r"blocks.0.up: its " + what) as refused:
        refuse_split_samples("blocks.0.up", what, [placement], shape, features)
    assert "‖Σ_r g_r‖² is not Σ_r ‖g_r‖²" in str(refused.value)


def test_split_features_are_not():
    for placement in (Shard(-1), Shard(2), Replicate(), Partial()):
        refuse_split_samples("head", "output", [Replicate(), placement], (4, 6, 8))


def late(context: Context) -> None:
    """The last rank never comes: the others stop within the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if context.rank == context.world_size - 1:
        return
    table = torch.ones(1, 1, 4)
    of_tensor = {mode: NormReducer(tensor_group=group, mode=mode) for mode in NORM_REDUCTIONS}
    sums = of_tensor["layerwise"].layerwise("a", lambda keys: table, every=1)
    sums.add("a")
    for wait, axis in (
        (sums.wait, "tensor-parallel"),
        (lambda: of_tensor["sync"].reduce(table).wait(), "tensor-parallel"),
        (lambda: of_tensor["async"].reduce(table).wait(), "tensor-parallel"),
        (lambda: NormReducer(data_parallel_group=group).gather(table[0]).wait(), "data"),
    ):
        with pytest.raises(RuntimeError, match=f"over the {axis} axis .4 ranks. failed") as lost:
            wait()
        assert isinstance(lost.value.__cause__, Exception)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(own_ranks):
    own_ranks.run(4, late)


def test_arguments():
    with pytest.raises(ValueError, match=r"not in .*bfloat16"):
        NormReducer(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"would be rounded to .*float32"):
        NormReducer().reduce(torch.ones(1, 1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="every is 0"):
        NormReducer().layerwise("a", torch.ones, every=0)


@on_ranks(2)
def test_one_group_is_not_two_axes(context: Context) -> None:
    with pytest.raises(ValueError, match="have ranks in common"):
        NormReducer(data_parallel_group=context.group, tensor_group=context.group)
