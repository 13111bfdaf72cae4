"""FSDP1: what travels and is gathered, steps that fail, and what is refused."""

from functools import partial

import pytest
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.detect import sharding_of
from tests.dp_clipping.conftest import private_loss
from tests.support import zoo
from tests.support.on_ranks import on_ranks
from tests.support.ranks import fsdp1, fsdp2
from tests.support.sharded_steps import (
    failed_steps,
    one_step,
    ordinary_collectives,
    private_collectives,
    refused_after_noise,
    refused_steps,
    transformer,
)

FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


# ---- what travels, and what is refused -----------------------------------------------------------


@on_ranks(2)
def test_collectives(context: Context) -> None:
    """None that reduces in the norm pass; parameters are gathered as often as without privacy."""
    batch, units = zoo.tokens(2, 6), 3  # two blocks and the root
    assert ordinary_collectives(fsdp1(context, transformer()), batch).reductions == units
    for mode, passes in (("bookkeeping", 1), ("per_sample", 1), ("ghost", 2)):
        counted = private_collectives(fsdp1(context, transformer()), mode, batch)
        assert counted.reductions == units
        # The root stays whole after a forward, for the first backward.
        assert counted.gathers == units + passes * (units - 1) + passes - 1, (mode, counted.calls)


@pytest.mark.parametrize(("strategy", "mode"), [(FULL, "bookkeeping"), (GRAD_OP, "ghost")])
def test_a_step_after_a_failed_one(cpu_ranks, strategy, mode):
    cpu_ranks.run(2, failed_steps, partial(fsdp1, strategy=strategy), (mode,))


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


def test_refusals(cpu_ranks):
    cpu_ranks.run(2, refused)


@pytest.mark.parametrize(
    "shard", [partial(fsdp1, strategy=FULL), partial(fsdp1, strategy=GRAD_OP), fsdp2],
    ids=["FULL_SHARD", "SHARD_GRAD_OP", "FSDP2"],
)  # fmt: skip
def test_an_ordinary_backward_after_the_noise_is_refused(cpu_ranks, shard):
    cpu_ranks.run(2, refused_after_noise, shard)
