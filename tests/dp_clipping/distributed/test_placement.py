"""Where parts lie: shown by parts of tensors whose every element is its own address."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.placement import Place, Span, _box, place_of, slices_of, spans_of
from tests.support import meshes
from tests.support.meshes import RANKS
from tests.support.on_ranks import on_ranks

SHAPES = [
    (8,),
    (1,),
    (7,),
    (0,),
    (8, 4),
    (5, 3),
    (1, 6),
    (3, 0),
    (4, 6, 2),
    (3, 5, 7),
    (2, 3, 3, 3),
]


def addresses(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).view(shape)


def elements(place: Place) -> Tensor:
    """By definition: which elements of the whole a part has, in its order."""
    found = {
        run.local_start + q * run.length + r: run.offset + q * run.stride + r
        for run in place
        for q in range(run.count)
        for r in range(run.length)
    }
    assert sorted(found) == list(range(sum(run.numel for run in place))), "gaps"
    return torch.tensor([found[i] for i in range(len(found))], dtype=torch.float64)


def check(parameter: Tensor) -> None:
    """Of a parameter that holds `addresses`."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    part = addresses(*parameter.shape)[slices_of(parameter)]
    assert torch.equal(part, local) or part.numel() == local.numel() == 0
    place = place_of(parameter)
    if place is None:
        assert local.shape == parameter.shape
    else:
        assert torch.equal(elements(place), local.flatten())


def mesh_of(*sizes: int) -> DeviceMesh:
    """This rank's mesh of that size, of several next to each other."""
    names = ("data", "tensor")[: len(sizes)]
    return meshes.mesh_of((RANKS // math.prod(sizes), *sizes), ("copy", *names))[names]


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_of_every_box(shape):
    whole = addresses(*shape)
    intervals = [
        [(a, b - a) for a in range(n + 1) for b in range(a, n + 1) if n < 4 or (a + b) % 3 == 0]
        for n in shape
    ]
    for box in itertools.product(*intervals):
        part = whole[tuple(slice(a, a + n) for a, n in box)]
        assert torch.equal(elements(spans_of(box, shape)), part.flatten()), box


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (1, 2), (2, 1), (2, 2), (4, 1)])
@on_ranks(RANKS)
def test_placements(context: Context, sizes: tuple[int, ...]) -> None:
    """Every combination on these meshes, with pieces that are uneven or empty."""
    mesh = mesh_of(*sizes)
    for shape in SHAPES:
        if len(shape) > 3:
            continue
        options = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(options, repeat=len(sizes)):
            whole = addresses(*shape)
            check(distribute_tensor(whole, mesh, placements, src_data_rank=None))


@on_ranks(RANKS)
def test_what_is_refused(context: Context) -> None:
    mesh = mesh_of(2)
    partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="Partial"):
        place_of(partial)
    uneven = DTensor.from_local(
        torch.zeros(3 if mesh.get_local_rank() else 1), mesh, [Shard(0)], shape=(4,), stride=(1,),
        run_check=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"gives this rank \[[13]\].*\[2\] was expected"):
        place_of(uneven)
    replicated = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
    assert place_of(replicated) is None
    outside = DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",))
    elsewhere = distribute_tensor(addresses(6), outside, [Shard(0)], src_data_rank=None)
    assert place_of(elsewhere) == (
        (Span(0, 3 * context.rank, 3, 3, 1),) if context.rank < 2 else ()
    )


def test_an_unknown_order_of_shards_is_refused():
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = (_StridedShard(0, split_factor=3), Shard(0))
    with pytest.raises(RuntimeError, match="order of shards is not supported"):
        _box((12,), (2, 2), (0, 0), placements)
    nested = (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=3), Shard(0))
    assert _box((12,), (2, 2, 3), (1, 0, 2), nested) == ((9, 1),)
    assert _box((12,), (2, 2, 3), (0, 1, 1), nested) == ((6, 1),)
