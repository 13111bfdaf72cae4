"""FSDP1 with every mode: norms and clipped sums are those of one process in float64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dp_clipping.distributed.detect import sharding_of
from lm.rank_pool import Context
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.sharded_steps import (
    EVERY,
    FEW,
    LIMIT,
    MOST,
    SPLITS,
    changed_steps,
    check_training,
    checkpointing,
    every_network,
    failed_steps,
    frozen,
    one_step,
    ordinary_collectives,
    private_collectives,
    refused_after_noise,
    refused_steps,
    split_steps,
    steps_in_16_bit,
    transformer,
)

FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


def sharded(
    context: Context, network: nn.Module, wrap="block", strategy=FULL, original=True, **options
) -> FSDP:
    """FSDP1 around every block and the root, or around the root alone."""
    options |= {"sharding_strategy": strategy, "use_orig_params": original}
    options |= {"device_id": context.device}
    if wrap == "block":
        for n, block in enumerate(network.blocks):
            network.blocks[n] = FSDP(block, context.group, **options)
    return FSDP(network, context.group, **options)


at_the_root = partial(sharded, wrap="root")


@pytest.mark.parametrize(
    ("wrap", "strategy", "runs"),
    [
        ("block", FULL, MOST),
        ("root", GRAD_OP, FEW),
        pytest.param("block", FULL, EVERY, marks=pytest.mark.slow),
        pytest.param("root", FULL, EVERY, marks=pytest.mark.slow),
        pytest.param("block", GRAD_OP, EVERY, marks=pytest.mark.slow),
    ],
    ids=["block-FULL", "root-GRAD_OP", "block-FULL-every", "root-FULL", "block-GRAD_OP"],
)
def test_norms_and_sums(cpu_ranks, wrap, strategy, runs):
    shard = partial(sharded, wrap=wrap, strategy=strategy)
    cpu_ranks.run(2, split_steps, shard, SPLITS[2], runs, wrap == "block")


def test_a_rank_without_samples(cpu_ranks):
    cpu_ranks.run(2, split_steps, sharded, [3, 0], FEW, True)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["block", "root"])
def test_norms_and_sums_on_four_ranks(cpu_ranks, wrap):
    cpu_ranks.run(4, split_steps, partial(sharded, wrap=wrap), SPLITS[4])


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_one_rank(cpu_ranks):
    cpu_ranks.run(1, split_steps, sharded, SPLITS[1], FEW)


@pytest.mark.slow
def test_the_zoo(cpu_ranks):
    cpu_ranks.run(2, every_network, at_the_root)


@pytest.mark.parametrize(
    ("mode", "microbatch", "strategy"),
    [
        ("bookkeeping", 1, GRAD_OP),
        ("ghost", None, FULL),
        pytest.param("bookkeeping", None, FULL, marks=pytest.mark.slow),
        pytest.param("ghost", 1, FULL, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_process(cpu_ranks, mode, microbatch, strategy):
    check_training(cpu_ranks, partial(sharded, strategy=strategy), mode, microbatch)


@pytest.mark.parametrize(
    ("change", "strategy"),
    [
        (frozen, GRAD_OP),
        (checkpointing, FULL),
        pytest.param(frozen, FULL, marks=pytest.mark.slow),
    ],
    ids=["frozen-GRAD_OP", "checkpointing-FULL", "frozen-FULL"],
)
def test_frozen_layers_and_recomputed_activations(cpu_ranks, change, strategy):
    cpu_ranks.run(2, changed_steps, partial(sharded, strategy=strategy), change)


def test_mixed_precision(cpu_ranks):
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    cpu_ranks.run(2, steps_in_16_bit, partial(sharded, mixed_precision=policy))


# ---- what travels, and what is refused -----------------------------------------------------------


def collectives(context: Context) -> None:
    """None that reduces in the norm pass; parameters are gathered as often as without privacy."""
    batch, units = zoo.tokens(2, 6), 3  # two blocks and the root
    assert ordinary_collectives(sharded(context, transformer()), batch).reductions == units
    for mode, passes in (("bookkeeping", 1), ("per_sample", 1), ("ghost", 2)):
        counted = private_collectives(sharded(context, transformer()), mode, batch)
        assert counted.reductions == units
        # The root stays whole after a forward, for the first backward.
        assert counted.gathers == units + passes * (units - 1) + passes - 1, (mode, counted.calls)


def test_collectives(cpu_ranks):
    cpu_ranks.run(2, collectives)


def gathered(context: Context, strategy) -> None:
    """A block's whole parameters are gone when backward is in the block before it."""
    batch = zoo.tokens(2, 6)
    for mode, passes in (("bookkeeping", 1), ("ghost", 2)):
        model = private(sharded(context, transformer(), strategy=strategy), mode, LIMIT)
        first, second = model.network.module.blocks
        there: list[list[int]] = []

        def sizes(_, units=(first, second), there=there) -> None:
            flat = [unit._handle.flat_param._full_param_padded for unit in units]
            there.append([bool(x.untyped_storage().size()) for x in flat])

        def watch(module, args, output, sizes=sizes) -> None:
            if output.requires_grad:
                output.register_hook(sizes)

        hook = first.module.feed_forward.register_forward_hook(watch)
        model.skip_checks()
        for _ in range(2):  # in the first samples are found
            there.clear()
            model.clear_gradients()
            one_step(model, batch, zoo.cross_entropy)
        hook.remove()
        assert there == [[True, False]] * passes, (mode, there)
        sizes(None)
        assert there[-1] == [False, False]


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda s: s.name)
def test_gathered_parameters_go(cpu_ranks, strategy):
    cpu_ranks.run(2, gathered, strategy)


@pytest.mark.parametrize(("strategy", "mode"), [(FULL, "bookkeeping"), (GRAD_OP, "ghost")])
def test_a_step_after_a_failed_one(cpu_ranks, strategy, mode):
    cpu_ranks.run(2, failed_steps, partial(sharded, strategy=strategy), (mode,))


def refused(context: Context) -> None:
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
            sharding_of(sharded(context, transformer(), **options))
    model = refused_steps(context, sharded, at_the_root)
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


def test_refusals(cpu_ranks):
    cpu_ranks.run(2, refused)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda s: s.name)
def test_an_ordinary_backward_after_the_noise_is_refused(cpu_ranks, strategy):
    cpu_ranks.run(2, refused_after_noise, partial(sharded, strategy=strategy))
