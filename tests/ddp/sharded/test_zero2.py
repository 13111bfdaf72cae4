"""`zero2`: of two buckets flat buffers are allocated at most, and after the reduction none."""

import weakref

import pytest
import torch
from torch import nn

from ddp.sharded.zero2 import Zero2DDP
from ddp.torch_compat import reduce_scatter
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp import test_accumulation, test_gradients, test_unused
from tests.support.beside import numbers
from tests.support.on_ranks import on_ranks

LAYERS, WIDTH = 8, 64
BUCKET_MB = 4 * WIDTH * WIDTH / (1 << 20)


class Counted(Zero2DDP):
    """Counts the flat buffers that are alive when one is about to be reduced."""

    def launch(self, unit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ddp.sharded.base.reduce_scatter", self.scatter)
            return super().launch(unit)

    def scatter(self, own, flat, *arguments):
        alive = self.__dict__.setdefault("alive", weakref.WeakSet())
        alive.add(flat)
        self.most = max(getattr(self, "most", 0), len(alive))
        return reduce_scatter(own.fill_(torch.nan), flat, *arguments)


@on_ranks(2)
def test_buckets_are_freed_while_backward_runs(context: Context) -> None:
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = Counted(network, process_group=context.group, bucket_size_mb=BUCKET_MB)
    assert len(model.units) == LAYERS
    for _ in range(2):
        model.most = 0
        model(numbers(2, WIDTH, seed=0, rank=context.rank, like=model)).sum().backward()
        assert model.most == 2
        model.finish_gradient_synchronization()
        assert not model.alive
        held = sum(unit.gradient.untyped_storage().nbytes() for unit in model.units)
        assert held == sum(p.nbytes for p in model.parameters()) / context.world_size
        assert not any(gradient.isnan().any() for gradient in model.whole_gradients())
        norm = model.clip_grad_norm_(1.0)
        assert norm.isfinite()
        model.zero_grad()


def bodies(context: Context) -> None:
    """Runs the tests most likely to differ from `zero1`; the slow set has all of them."""
    test_gradients.train_beside_reference(context, "zero2", "adamw", "mean")
    test_accumulation.accumulated(
        context, "zero2", "two_synchronising_backwards", "never_zeroed",
        "no_sync_behind_a_synchronising_backward",
    )  # fmt: skip
    test_unused.untouched_where_nobody_used_it(context, "zero2")
    test_unused.planned(context, "zero2", *test_unused.BEYOND_TORCH)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_behaviour(cpu_ranks, world_size):
    cpu_ranks.run(world_size, bodies)
