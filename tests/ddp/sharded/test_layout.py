"""How a flat buffer is divided: every element has one owner, whatever the shapes and ranks."""

import gc

import pytest
import torch
from torch import nn

from ddp.sharded.layout import FlatUnit, lay_out
from lm.rank_pool import Context

SHAPES = [
    [(3, 5), (), (7,), (2, 3, 4)],
    [(1,)],
    [(0, 4), (5,), (0,)],
    [(131, 13), (13,), (1, 1)],
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_pieces_tile_every_parameter(shapes, world_size):
    for itemsize in (2, 4, 8):
        layout = lay_out([torch.Size(s) for s in shapes], itemsize, world_size)
        assert layout.numel == world_size * layout.slice_numel
        assert layout.slice_numel * itemsize % 16 == 0
        flat = torch.full((layout.numel,), -1)
        for member, view in enumerate(layout.views(flat)):
            view.copy_(torch.arange(view.numel()).view(view.shape) + 10_000 * member)
            assert layout.offsets[member] * itemsize % 16 == 0
        found = []
        for rank in range(world_size):
            own = layout.slice_of(flat, rank)
            for piece in layout.pieces(rank):
                values = own[piece.start : piece.start + piece.numel]
                first = 10_000 * piece.member + piece.offset
                assert values.tolist() == list(range(first, first + piece.numel))
                found += values.tolist()
        assert sorted(found) == flat[flat >= 0].tolist()


def stand_ins(context: Context) -> None:
    parameters = [nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in ((3, 2), (), (5,))]
    unit = FlatUnit(parameters, context.group)
    flat = unit.flatten()
    unit.shard = unit.layout.slice_of(flat, unit.rank)
    unit.gradient = torch.arange(unit.layout.slice_numel).float() + 100 * context.rank
    for p, gradient in zip(parameters, unit.stand_ins(), strict=True):
        p.grad_dtype = None
        p.grad = gradient
        assert p.grad.shape == p.shape
        assert p.grad.isnan().all()
        assert unit.is_stand_in(p.grad)
    assert not unit.is_stand_in(torch.ones(3))
    parameters[2].grad.zero_()  # as zero_grad(set_to_none=False) does
    for member, p in enumerate(parameters):
        behind = unit.own_gradient_behind(p.grad, member)
        expected = torch.zeros(p.numel())
        for piece in unit.pieces:
            if piece.member == member and member != 2:
                expected[piece.offset :][: piece.numel] = unit.gradient_of(piece)
        assert torch.equal(behind, expected.view(p.shape))
    whole = unit.gather(unit.gradient)
    assert [g.shape for g in whole] == [p.shape for p in parameters]
    assert whole[0].flatten().tolist() == [*range(6)]
    del unit
    gc.collect()
    for options in ({}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"foreach": True}):
        with pytest.raises(RuntimeError, match="SGD steps whole parameters"):
            torch.optim.SGD(parameters[:2], lr=0.1, **options).step()
    assert all((p == 1).all() for p in parameters)


def test_stand_ins_say_what_is_not_here(cpu_ranks):
    cpu_ranks.run(2, stand_ins)
