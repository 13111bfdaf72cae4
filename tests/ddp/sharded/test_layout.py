"""How a flat buffer is divided: every element has one owner, whatever the shapes and ranks."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.sharded.layout import FlatUnit
from ddp.sharded.slices import pieces_of
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks

SHAPES = [
    [(3, 5), (), (7,), (2, 3, 4)],
    [(1,)],
    [(0, 4), (5,), (0,)],
    [(0,)],
    [(32,), (0,)],
    [(131, 13), (13,), (1, 1)],
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_pieces_tile_every_parameter(context: Context) -> None:
    for shapes, dtype in product(SHAPES, (torch.bfloat16, torch.float32, torch.float64)):
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        unit = FlatUnit(parameters, context.group)
        assert unit.numel == context.world_size * unit.slice_numel
        assert unit.slice_numel * dtype.itemsize % 16 == 0
        flat = torch.full((unit.numel,), -1)
        for member, view in enumerate(unit.views(flat)):
            view.copy_(torch.arange(view.numel()).view(view.shape) + 10_000 * member)
            assert unit.offsets[member] * dtype.itemsize % 16 == 0
        member_of = {parameter: member for member, parameter in enumerate(parameters)}
        pieces = pieces_of(unit)
        for piece in pieces:
            values = unit.own(flat)[piece.of_own]
            part = unit.views(flat)[member_of[piece.parameter]]
            assert torch.equal(values, part.view(-1)[piece.of_whole])
        everyone = [([], [])] * context.world_size
        mine = [value for piece in pieces for value in unit.own(flat)[piece.of_own].tolist()]
        dist.all_gather_object(
            everyone, (mine, [member_of[p.parameter] for p in pieces]), group=context.group
        )
        assert (
            sorted(value for values, _ in everyone for value in values) == flat[flat >= 0].tolist()
        )
        owners = Counter(member for _, members in everyone for member in members)
        assert set(owners) == set(range(len(shapes)))
        assert all(owners[m] == 1 for m, p in enumerate(parameters) if not p.numel())
