"""FSDP2 with every mode: norms and clipped sums are those of one process in float64."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dp_clipping.distributed.detect import sharding_of
from dp_clipping.layers.recorder import LINEAR
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.step.sums import work
from experiments.verify_correctness import reference as oracle
from lm.parallel import parallelize
from lm.rank_pool import Context
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.replicas import build, part, train
from tests.support.sharded_steps import (
    EVERY,
    FEW,
    LIMIT,
    MOST,
    SPLITS,
    Counted,
    changed_steps,
    check_training,
    checkpointing,
    every_network,
    fail,
    failed_steps,
    frozen,
    one_step,
    ordinary_collectives,
    private_collectives,
    refused_after_noise,
    refused_steps,
    shard_fsdp2,
    split_steps,
    steps_in_16_bit,
    transformer,
    whole,
    whole_parameters,
)


def sharded(context: Context, network: nn.Module, wrap: str = "block", **options) -> nn.Module:
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    return shard_fsdp2(network, wrap, mesh, **options)


at_the_root = partial(sharded, wrap="root")


@pytest.mark.parametrize(
    ("wrap", "runs"),
    [
        *(("leaf", FEW), ("block", MOST), ("root", FEW)),
        pytest.param("block", EVERY, marks=pytest.mark.slow),
    ],
)
def test_norms_and_sums(cpu_ranks, wrap, runs):
    cpu_ranks.run(2, split_steps, partial(sharded, wrap=wrap), SPLITS[2], runs, wrap == "block")


@pytest.mark.parametrize(
    ("wrap", "runs"), [("block", FEW), pytest.param("leaf", EVERY, marks=pytest.mark.slow)]
)
def test_norms_and_sums_on_four_ranks(cpu_ranks, wrap, runs):
    cpu_ranks.run(4, split_steps, partial(sharded, wrap=wrap), SPLITS[4], runs)


@pytest.mark.slow
def test_the_zoo(cpu_ranks):
    cpu_ranks.run(2, every_network, at_the_root)


@pytest.mark.parametrize(
    ("mode", "microbatch", "pad"),
    [("bookkeeping", None, False), ("ghost", 1, False), ("bookkeeping", 3, True)],
)
def test_training_is_that_of_one_process(cpu_ranks, mode, microbatch, pad):
    check_training(cpu_ranks, sharded, mode, microbatch, pad)


@pytest.mark.parametrize("change", [frozen, checkpointing])
def test_frozen_layers_and_recomputed_activations(cpu_ranks, change):
    cpu_ranks.run(2, changed_steps, sharded, change)


def test_mixed_precision(cpu_ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cpu_ranks.run(2, steps_in_16_bit, partial(sharded, mp_policy=policy))


# ---- the view of all ranks -----------------------------------------------------------------------


def adapted(context: Context | None, path: str | None = None):
    """Threshold, parameters and statistics after steps whose C follows the norms."""
    shard = None if context is None else partial(sharded, context)
    threshold = AdaptiveThreshold(0.7, expected_batch_size=4, quantile=0.4, count_std=6.0)
    run = build(context, shard=shard, name="transformer", adaptive_threshold=threshold)
    seen = []
    run.optimizer.attach_step_hook(lambda _: seen.append(run.model.norm_statistics()))
    train(run, 3)
    if path is not None:
        run.engine.save_checkpoint(
            path=path, module=run.model, optimizer=run.optimizer, data_loader=run.loader
        )
    train(run, 2)
    return threshold.max_grad_norm, seen, whole_parameters(run)


def test_threshold_and_statistics_are_those_of_one_process(cpu_ranks):
    limit, seen, expected = adapted(None)
    assert limit != 0.7
    assert sum(one.samples for one in seen) > 0
    for found_limit, found_seen, found in cpu_ranks.run(2, adapted):
        assert found_limit == pytest.approx(limit, rel=1e-6)
        assert [(s.samples, s.clipped, s.histogram) for s in found_seen] == [
            (s.samples, s.clipped, s.histogram) for s in seen
        ]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def resumed(context: Context, path: str):
    """The last two of five steps, from the checkpoint of another number of ranks: the same steps,
    since the keys are fixed."""
    threshold = AdaptiveThreshold(0.7, expected_batch_size=4, quantile=0.4, count_std=6.0)
    run = build(
        context,
        shard=partial(sharded, context),
        name="transformer",
        adaptive_threshold=threshold,
    )
    run.engine.load_checkpoint(
        path=path, module=run.model, optimizer=run.optimizer, data_loader=run.loader
    )
    train(run, 2)
    return threshold.max_grad_norm, run.optimizer.steps, whole_parameters(run)


def test_a_run_goes_on_with_fewer_ranks(cpu_ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    (limit, _, expected), *_ = cpu_ranks.run(4, adapted, path)
    for found_limit, steps, found in cpu_ranks.run(2, resumed, path):
        assert (found_limit, steps) == (pytest.approx(limit, rel=1e-6), 5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# ---- what FSDP can be told -----------------------------------------------------------------------


def collectives(context: Context) -> None:
    """None that reduces in the norm pass; parameters are gathered as often as without privacy."""
    batch, units = zoo.tokens(2, 6), 3  # two blocks and the root
    ordinary = ordinary_collectives(sharded(context, transformer()), batch)
    assert ordinary.reductions >= units
    backward = ordinary.gathers - units
    for mode, passes in (("bookkeeping", 1), ("per_sample", 1), ("ghost", 2)):
        counted = private_collectives(sharded(context, transformer()), mode, batch)
        assert counted.reductions == units
        # A second backward gathers the root too, which stays whole after a forward.
        assert counted.gathers <= units + passes * backward + (passes - 1), (mode, counted.gathers)


def test_collectives(cpu_ranks):
    cpu_ranks.run(2, collectives)


def test_a_step_after_a_failed_one(cpu_ranks):
    cpu_ranks.run(2, failed_steps, sharded)


def broken(context: Context) -> None:
    """Where FSDP2 cannot be told of a failed pass, nothing is computed after one."""
    batch = zoo.tokens(2, 6)
    model = private(sharded(context, transformer()), "bookkeeping")
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


def test_nothing_is_computed_with_what_a_failed_step_left(cpu_ranks):
    cpu_ranks.run(2, broken)


def refused(context: Context) -> None:
    network = transformer()
    fully_shard(network.blocks[0], mesh=DeviceMesh.from_group(context.group, "cpu"))
    with pytest.raises(ValueError, match=r"blocks\.0, but not to the module itself"):
        sharding_of(network)
    refused_steps(context, sharded, at_the_root)


def test_refusals(cpu_ranks):
    cpu_ranks.run(2, refused)


def test_an_ordinary_backward_after_the_noise_is_refused(cpu_ranks):
    cpu_ranks.run(2, refused_after_noise, sharded)


# ---- on fused kernels, in the interpreter --------------------------------------------------------


SOME = [
    ("flash_bookkeeping", "per_layer", "fsdp2", "each"),
    ("flash_bookkeeping", "per_layer", "fsdp2", "crowded"),
    ("flash", "flat", "tensor", "together"),
]
REST = [
    *product(
        ("flash_bookkeeping", "flash"), ("flat", "per_layer"), ("fsdp2", "tensor"), ["together"]
    ),
    ("flash_bookkeeping", "per_layer", "tensor", "each"),
    ("flash", "flat", "fsdp2", "each"),
    *product(("flash_bookkeeping", "flash"), ("flat", "per_layer"), ("tensor",), ["crowded"]),
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
                stack.enter_context(patch.object(work, "UNIT_BYTES", 0))
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
        if model.step_state.pending.work._is_in_backward:
            left.append(len(parameters))
        launch(parameters, totals)

    model.step_context.sums._launch = noted
    return left


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"]
)
def test_fused_in_the_interpreter(interpreter, cases):
    interpreter.ranks.run(2, fused_steps, cases)
