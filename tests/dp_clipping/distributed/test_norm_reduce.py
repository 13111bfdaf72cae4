"""Norms over ranks: where they add up, where they must not, and that every rank has the same."""

import math
import os
import random
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.rank_pool import Context, RankPool
from dp_clipping.distributed.global_norms import GlobalNorms
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS, NormReducer, refuse_split_samples
from tests.support import seeds, zoo
from tests.support.on_ranks import on_ranks

MESHES = {"data": (2, 1), "tensor": (1, 2), "data x tensor": (2, 2), "tensor of 4": (1, 4)}
TENSOR_MESHES = [name for name, (_, tensor) in MESHES.items() if tensor > 1]
BATCH = 7  # samples of the global batch
GROUPS = 2  # clipping groups


def world_size_of(mesh: str) -> int:
    return MESHES[mesh][0] * MESHES[mesh][1]


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


@cache
def gradients() -> oracle.Gradients:
    """Returns the gradients of an MLP, one backward per sample, of the whole batch."""
    network = zoo.seeded(lambda: zoo.mlp(5, 8, 4))
    return oracle.per_sample_gradients(network, zoo.numbers(BATCH, 5, out=(4,)), zoo.squared_error)


def reference() -> Tensor:
    """Squared norms [K, G] of a single process; parameters belong to the groups in turn."""
    table = torch.zeros(GROUPS, BATCH, dtype=torch.float64)
    for number, g in enumerate(gradients().values()):
        table[number % GROUPS] += oracle.per_sample_sum(g.square())
    return table


class Part:
    """What one rank computes: its samples, its shards of weights, all of the biases."""

    def __init__(self, context: Context, mesh: str, reducer: NormReducer, mine: slice):
        shards = MESHES[mesh][1]
        self.device, self.mine, self.squares = context.device, mine, {}
        for number, (name, g) in enumerate(gradients().items()):
            is_sharded = name.endswith("weight")
            if is_sharded:
                g = g.chunk(shards, dim=1)[context.rank % shards]
            counted = is_sharded or reducer.tensor.rank == 0
            own = oracle.per_sample_sum(g[mine].square())
            self.squares[name] = number % GROUPS, own if counted else torch.zeros_like(own)

    def table(self, names) -> Tensor:
        """[1, K, B] of some parameters."""
        table = torch.zeros(1, GROUPS, len(range(BATCH)[self.mine]), dtype=torch.float64)
        for name in names:
            group, squares = self.squares[name]
            table[0, group] += squares
        return table.to(self.device)


# ---- what clipping needs -------------------------------------------------------------------------


def reduced(context: Context, mesh: str, mode: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's table before and after."""
    reducer = reducer_of(context, mesh, mode, dtype)
    part = Part(context, mesh, reducer, slice(0, BATCH))
    own = part.table(part.squares).to(dtype)
    before = own.clone()
    if mode == "layerwise":
        order = list(part.squares)
        sums = reducer.layerwise(order, lambda names: part.table(names).to(dtype), every=1)
        random.Random(context.rank).shuffle(order)  # another order on every rank
        for name in order[:-1]:
            sums.add(name)
        assert sums.launched < len(order)
        sums.add(order[-1])
        assert sums.launched == len(order)
        total = sums.wait()
        assert torch.equal(total, sums.wait())
    else:
        flight = reducer.reduce(own)
        total = flight.wait()
        assert torch.equal(total, flight.wait())
    assert torch.equal(own, before), "the table given is not changed"
    return own.cpu(), total.cpu()


def assert_reduced(answers: list[tuple[Tensor, Tensor]], shards: int, dtype: torch.dtype) -> None:
    """What each rank had and got: other parts before, the same bits after, of one process."""
    for one in range(0, len(answers), shards):
        before, after = zip(*answers[one : one + shards], strict=True)
        assert all(not torch.equal(before[0], other) for other in before[1:])
        assert all(torch.equal(after[0], other) for other in after[1:])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for _, after in answers:
        torch.testing.assert_close(after[0].double(), reference(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mode", NORM_REDUCTIONS)
@pytest.mark.parametrize("mesh", TENSOR_MESHES)
def test_tensor_ranks_differ_before_and_are_identical_after(cpu_ranks, mesh, mode, dtype):
    answers = cpu_ranks.run(world_size_of(mesh), reduced, mesh, mode, dtype)
    assert_reduced(answers, MESHES[mesh][1], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", NORM_REDUCTIONS)
def test_the_same_on_gpus(gpu_ranks, mode):
    answers = gpu_ranks.run(2, reduced, "tensor", mode, torch.float32)
    assert_reduced(answers, 2, torch.float32)


@on_ranks(2)
def test_norms_of_different_samples_are_not_summed(context: Context) -> None:
    reducer = reducer_of(context, "data", "async")
    assert not reducer.splits_parameters
    own = torch.rand(2, GROUPS, 3 + context.rank, dtype=torch.float64) + context.rank
    assert torch.equal(reducer.reduce(own).wait(), own)


def test_one_process_takes_the_same_path():
    own = torch.rand(2, 1, 3)
    for mode in NORM_REDUCTIONS:
        reducer = NormReducer(mode=mode)
        sums = reducer.layerwise("ab", lambda keys: own * len(keys) / 2, every=1)
        sums.add("b")
        assert sums.launched == 0
        sums.add("a")
        assert sums.launched == 2
        for total in (reducer.reduce(own).wait(), sums.wait()):
            torch.testing.assert_close(total, own)
        norms = GlobalNorms(reducer, own[0])
        assert norms.sizes == [3]
        torch.testing.assert_close(norms.wait(), own[0])


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

    sums = reducer.layerwise(order, table, every)
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


# ---- the global vector ---------------------------------------------------------------------------


@on_ranks(2)
def test_reading_is_up_to_each_rank(context: Context) -> None:
    reducer = reducer_of(context, "data", dtype=torch.float32)
    steps = [GlobalNorms(reducer, torch.full((1, 2), float(n))) for n in range(3)]
    if context.rank == 0:
        assert steps[1].wait().tolist() == [[1.0] * 4]
    dist.barrier(context.group)


@on_ranks(4)
def test_tensor_ranks_have_the_same_samples(context: Context) -> None:
    reducer = reducer_of(context, "data x tensor")
    own = torch.ones(1, 3 if context.rank else 2)  # rank 1 is its tensor-parallel partner
    with pytest.raises(RuntimeError, match="must sample the same batches"):
        GlobalNorms(reducer, own)


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


# ---- why not over samples ------------------------------------------------------------------------


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


# ---- what goes wrong -----------------------------------------------------------------------------


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
        (lambda: GlobalNorms(NormReducer(data_parallel_group=group), table[0]), "data"),
    ):
        with pytest.raises(RuntimeError, match=f"over the {axis} axis .4 ranks. failed") as lost:
            wait()
        assert isinstance(lost.value.__cause__, Exception)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(own_ranks):
    own_ranks.run(4, late)


def dies(context: Context) -> None:
    reducer = NormReducer(data_parallel_group=context.group, mode="async")
    GlobalNorms(reducer, torch.ones(1, 2)).wait()
    if context.rank == 1:
        os._exit(3)
    GlobalNorms(reducer, torch.ones(1, 2)).wait()


@pytest.mark.slow
def test_a_rank_that_dies_stops_the_others():
    pool = RankPool(3, prepare=seeds.replace_entropy, **seeds.ON_RANKS)
    with pytest.raises(AssertionError) as failed:
        pool.run(3, dies)
    text = str(failed.value)
    assert "the process died (exit code 3)" in text
    assert text.count("over the data axis (3 ranks) failed") >= 1


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
