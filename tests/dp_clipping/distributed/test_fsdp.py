"""FSDP: what travels, steps that fail, what is refused, and fused kernels in the interpreter."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.parallel import parallelize
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.detect import sharding_of
from dp_clipping.layers.recorder import LINEAR
from dp_clipping.step.sums import sync_points, work
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.on_ranks import on_ranks
from tests.support.ranks import SPLITS, fsdp1, fsdp2, replicated
from tests.support.replicas import part
from tests.support.sharded_steps import (
    LIMIT,
    Counted,
    fail,
    failed_steps,
    one_step,
    ordinary_collectives,
    private_collectives,
    refused_after_noise,
    refused_steps,
    transformer,
    whole,
)

FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


@pytest.mark.parametrize("shard", [fsdp1, fsdp2], ids=["FSDP1", "FSDP2"])
@on_ranks(2)
def test_collectives(context: Context, shard: Callable) -> None:
    """None that reduces in the norm pass; parameters are gathered as often as without privacy."""
    batch, units = zoo.tokens(2, 6), 3  # two blocks and the root
    ordinary = ordinary_collectives(shard(context, transformer()), batch)
    assert ordinary.reductions >= units
    backward = ordinary.gathers - units
    for mode, passes in (("bookkeeping", 1), ("per_sample", 1), ("ghost", 2)):
        counted = private_collectives(shard(context, transformer()), mode, batch)
        assert counted.reductions == units
        # A second backward gathers the root too, which stays whole after a forward.
        assert counted.gathers <= units + passes * backward + (passes - 1), (mode, counted.gathers)


TOLD = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="only torch 2.13 and later can tell FSDP2"
)


@pytest.mark.parametrize(
    ("shard", "modes"),
    [
        (partial(fsdp1, strategy=FULL), ("bookkeeping",)),
        (partial(fsdp1, strategy=GRAD_OP), ("ghost",)),
        pytest.param(fsdp2, ("bookkeeping", "ghost"), marks=TOLD),
    ],
    ids=["FULL_SHARD", "SHARD_GRAD_OP", "FSDP2"],
)
def test_a_step_after_a_failed_one(cpu_ranks, shard, modes):
    cpu_ranks.run(2, failed_steps, shard, modes)


@on_ranks(2)
def test_a_first_forward_that_fails_before_fsdp_begins(context: Context) -> None:
    """Its own error is raised, and the next step is right."""
    model = private(fsdp2(context, transformer()))
    with pytest.raises(ValueError, match="forward got no tensor"):
        model("text")
    private_loss(model, zoo.tokens(2, 6), zoo.cross_entropy).backward()


@on_ranks(2)
def test_nothing_is_computed_with_what_a_failed_step_left(context: Context) -> None:
    """Where FSDP2 cannot be told of a failed pass, nothing is computed after one."""
    batch = zoo.tokens(2, 6)
    model = private(fsdp2(context, transformer()), "bookkeeping")
    hook = model.network.blocks[1].register_forward_pre_hook(fail)
    with pytest.MonkeyPatch.context() as patch, Counted() as counted:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.raises(ArithmeticError):
            private_loss(model, batch, zoo.cross_entropy)
        hook.remove()
        counted.calls.clear()
        with pytest.raises(RuntimeError, match="an earlier step of this sharded model failed"):
            private_loss(model, batch, zoo.cross_entropy)
        assert not counted.calls


def refused_of_fsdp2(context: Context) -> None:
    network = transformer()
    fully_shard(network.blocks[0], mesh=DeviceMesh.from_group(context.group, "cpu"))
    with pytest.raises(ValueError, match=r"blocks\.0, but not to the module itself"):
        sharding_of(network)
    refused_steps(context, fsdp2, partial(fsdp2, wrap="root"))
    model = private(fsdp2(context, Slope(), wrap="root"))
    with pytest.raises(RuntimeError, match=r"differentiates in its forward.*train replicas"):
        model(torch.randn(3, 4))
    model = private(fsdp2(context, nn.Sequential(Rounded()), wrap="root"))
    refused = r'first batch \(a torch.autograd.Function computes .*wrap\("zero2", network\)'
    with pytest.raises(ValueError, match=refused):
        model(torch.randn(3, 4))
    instead = private(replicated("zero2")(context, nn.Sequential(Rounded())))
    assert instead(torch.randn(3, 4)).shape == (3, 4)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return (weight * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounded(nn.Module):
    """A linear layer whose weight is rounded by a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ Round.apply(self.weight)


class Slope(nn.Module):
    """Returns the gradient of a number by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def refused_of_fsdp1(context: Context) -> None:
    network = transformer()
    network.blocks[0] = FSDP(network.blocks[0], context.group, device_id=context.device)
    with pytest.raises(ValueError, match="wrap the root too"):
        sharding_of(network)
    for options, message in (
        ({"original": False}, "use_orig_params=True"),
        ({"strategy": ShardingStrategy.NO_SHARD}, "FSDP1 with NO_SHARD"),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "leave parameters on the GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            sharding_of(fsdp1(context, transformer(), **options))
    model = refused_steps(context, fsdp1, partial(fsdp1, wrap="root"))
    batch = zoo.tokens(2, 6)
    model.clear_gradients()
    one_step(model, batch, zoo.cross_entropy)
    model.gradient_buffer.watch.refuse_unclipped()
    # In a forward FSDP1 makes what is left there its own.
    model.step_state.add_noise()
    model.step_state.apply()
    loss = private_loss(model, batch, zoo.cross_entropy)
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
        loss.backward()


@pytest.mark.parametrize("body", [refused_of_fsdp1, refused_of_fsdp2])
def test_refusals(cpu_ranks, body):
    cpu_ranks.run(2, body)


@pytest.mark.parametrize(
    "shard", [partial(fsdp1, strategy=FULL), partial(fsdp1, strategy=GRAD_OP), fsdp2],
    ids=["FULL_SHARD", "SHARD_GRAD_OP", "FSDP2"],
)  # fmt: skip
def test_an_ordinary_backward_after_the_noise_is_refused(cpu_ranks, shard):
    cpu_ranks.run(2, refused_after_noise, shard)


SOME = [
    ("flash_bookkeeping", "per_layer", "fsdp2", "crowded"),
    ("flash_bookkeeping", "per_layer", "tensor", "crowded"),
]
REST = [
    ("flash_bookkeeping", "per_layer", "fsdp2", "each"),
    ("flash", "flat", "tensor", "together"),
    *product(
        ("flash_bookkeeping", "flash"), ("flat", "per_layer"), ("fsdp2", "tensor"), ["together"]
    ),
    ("flash_bookkeeping", "per_layer", "tensor", "each"),
    ("flash", "flat", "fsdp2", "each"),
    ("flash_bookkeeping", "flat", "tensor", "crowded"),
    *product(["flash"], ("flat", "per_layer"), ("tensor",), ["crowded"]),
    ("flash", "flat", "fsdp2", "crowded"),
]  # fmt: skip


def fused_steps(context: Context, cases: list[tuple]) -> None:
    """One float32 step of each fused mode: per layer, sums leave while backward gathers, those of
    each FSDP module by itself or of several together; one rank may have no memory to wait in."""
    counts = SPLITS[context.world_size]
    batch = zoo.tokens(sum(counts), 6)
    single = lambda: zoo.seeded(zoo.transformer)  # noqa: E731
    gradients = oracle.per_sample_gradients(single(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    mine = part(counts, context.rank)
    for mode, clipping, how, when in cases:
        mesh = DeviceMesh.from_group(
            context.group, "cpu", mesh_dim_names=("tensor" if how == "tensor" else "data",)
        )
        expected = oracle.clipped_sum(gradients, LIMIT, clipping)
        model = private(
            parallelize(single(), mesh), mode, LIMIT, clipping, policy={"tile_size": 16},
            norm_reduction="layerwise" if clipping == "flat" else "sync",
        )  # fmt: skip
        own = slice(None) if how == "tensor" else mine
        left_in_backward = note_departures(model)
        with ExitStack() as stack:
            most = [0]
            if when == "each":
                stack.enter_context(patch.object(sync_points, "UNIT_BYTES", 0))
            if when == "crowded" and context.rank == 1:
                stack.enter_context(patch.object(work, "PENDING_BYTES", 0))
                stack.enter_context(patch.object(work.Work, "_has_room", full(most, model)))
            one_step(model, oracle.pick(batch, own), zoo.cross_entropy)
        if how == "fsdp2":
            units = len(model.sharding.units)
            leave = mode == "flash" or clipping == "per_layer"
            fewest = units if when == "each" else 1
            assert fewest * leave <= len(left_in_backward) <= units * leave
            assert most[0] <= 1  # layers that wait where there is no room
        assert "predicted ms" in model.plan_table()  # a fused session it was
        torch.testing.assert_close(
            model.per_sample_gradient_norms.double(), norms[own], rtol=2e-5, atol=0
        )
        for name, parameter in model.network.named_parameters():
            total = whole(parameter.grad).double()
            torch.testing.assert_close(total, expected[name], rtol=0, atol=4e-5)


def full(most: list[int], model) -> Callable:
    """No more may wait: and how many linear layers do, at most."""

    def has_room(_) -> bool:
        waiting = model.step_state.pending.work.waiting
        most[0] = max(most[0], sum(left.kind == LINEAR for left in waiting))
        return False

    return has_room


def note_departures(model) -> list[int]:
    """Grows with each FSDP module whose sums leave while a backward is under way."""
    left, launch = [], model.step_context.sums._launch

    def noted(parameters, totals):
        if model.step_state.pending.work.points.defers_sums:
            left.append(len(parameters))
        launch(parameters, totals)

    model.step_context.sums._launch = noted
    return left


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"]
)
def test_fused_in_the_interpreter(interpreter, cases):
    interpreter.ranks.run(2, fused_steps, cases)
