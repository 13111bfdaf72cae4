"""Parameters of the root, or of another module around blocks, where ranks gather the blocks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from ddp import wrap
from experiments.verify_correctness import reference as oracle
from lm.rank_pool import Context
from tests.dp_clipping.conftest import MODES, assert_close, gradients_of, private, private_loss
from tests.support import around_blocks, zoo
from tests.support.replicas import build, part, train
from tests.support.sharded_steps import whole, whole_gradients

HOWS = ("fsdp", "fsdp2_block", "fsdp2_leaf", "fsdp1_block")
EVERY = [(mode, clipping) for mode in MODES for clipping in ("flat", "per_layer")]
FEW = [("ghost", "flat"), ("bookkeeping", "per_layer")]
SPLITS = {1: [4], 2: [3, 1]}
LEAVES = (nn.Linear, nn.LayerNorm)
SOME = (
    "lists",
    "nested",
    "tied",
    "linked",
    "frozen_block",
    "frozen_parameter",
    "checkpointed_product",
)


def shard(context: Context, network: nn.Module, how: str) -> nn.Module:
    kind, _, units = how.partition("_")
    names = [name for name, _ in network.named_modules() if name]
    chosen = around_blocks.blocks(network) if units == "block" else []
    if units == "leaf":
        chosen = [name for name in names if isinstance(network.get_submodule(name), LEAVES)]
    if kind == "fsdp2":
        mesh = DeviceMesh.from_group(context.group, "cpu")
        for name in reversed(chosen):
            fully_shard(network.get_submodule(name), mesh=mesh)
        return fully_shard(network, mesh=mesh)
    if kind == "fsdp1":
        options = {"use_orig_params": True, "device_id": context.device}
        for name in reversed(chosen):
            unit = FSDP(network.get_submodule(name), context.group, **options)
            network.set_submodule(name, unit)
        return FSDP(network, context.group, **options)
    return wrap(how, network, process_group=context.group)


def steps(context: Context, names: list[str], how: str, runs: list, looks: bool = False) -> None:
    """Norms and sums of a step are those of one sample at a time in float64."""
    batch = oracle.move(zoo.classes(4, 6, 5), dtype=torch.float64)
    mine = part(SPLITS[context.world_size], context.rank)
    for name in names:
        gradients = oracle.per_sample_gradients(around_blocks.make(name), batch, zoo.cross_entropy)
        norms = oracle.norms(gradients)
        limit = float(norms.median())
        for mode, clipping in runs:
            model = private(shard(context, around_blocks.make(name), how), mode, limit, clipping)
            if not looks:
                model.skip_checks()
            for _ in range(2):
                model.clear_gradients()
                private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
                model.finish_synchronization()
                found = model.per_sample_gradient_norms
                torch.testing.assert_close(found, norms[mine], rtol=1e-7, atol=0, msg=name)
            gather = whole_gradients if how.startswith(("fsdp1", "fsdp2")) else gradients_of
            assert_close(gather(model), oracle.clipped_sum(gradients, limit, clipping), 3e-6)


def networks(how: str) -> list[str]:
    """FSDP2 wants a parameter that two modules have in one unit."""
    return [name for name in around_blocks.NETWORKS if (name, how) != ("tied", "fsdp2_leaf")]


@pytest.mark.parametrize("how", HOWS)
def test_norms_and_sums(cpu_ranks, how):
    names = [name for name in networks(how) if name in SOME]
    cpu_ranks.run(2, steps, names, how, [("bookkeeping", "flat")])
    cpu_ranks.run(2, steps, ["vit", "product"], how, [("ghost", "per_layer")])


@pytest.mark.slow
@pytest.mark.parametrize("how", [*HOWS, "fsdp1_root", "fsdp2_root", "zero1", "zero2"])
def test_every_mode(cpu_ranks, how):
    names = networks(how)
    cpu_ranks.run(2, steps, names, how, EVERY, True)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize(
    "how",
    [
        *("fsdp2_block", "fsdp1_block"),
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("fsdp", "fsdp2_leaf")),
    ],
)
def test_one_rank_that_looks_for_samples_that_see_each_other(cpu_ranks, how):
    cpu_ranks.run(1, steps, ["vit", "product", "frozen_block"], how, FEW, True)


def trained(context: Context | None, how: str, mode: str) -> list[torch.Tensor]:
    """Parameters after three steps with noise, through make_private."""
    make = lambda: around_blocks.make("product").float()  # noqa: E731
    options = {"name": "class_token", "module": make(), "grad_sample_mode": mode}
    if context is not None and how.startswith("fsdp2"):
        options["shard"] = lambda network: shard(context, network, how)
    run = build(context, how, **options)
    train(run, 3)
    with run.optimizer.model.whole_parameters():
        return [whole(p).detach().clone() for p in run.model.network.parameters()]


@pytest.mark.parametrize(("how", "mode"), [("fsdp", "bookkeeping"), ("fsdp2_block", "ghost")])
def test_training_is_that_of_one_process(cpu_ranks, how, mode):
    expected = trained(None, how, mode)
    for found in cpu_ranks.run(2, trained, how, mode):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def handed(context: Context, how: str) -> str:
    """What is said where the layers would have to run under vmap; it works with what it says."""
    batch = oracle.move(zoo.classes(4, 6, 5), dtype=torch.float64)
    model = private(shard(context, around_blocks.make("handed"), how))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"it gives blocks\.0.* a tensor made of") as raised:
            private_loss(model, batch, zoo.cross_entropy)
    steps(context, ["handed_expanded"], how, FEW[:1])
    steps(context, ["handed"], {"fsdp": "zero2"}.get(how, how.replace("block", "root")), FEW[:1])
    return str(raised.value)


@pytest.mark.parametrize("how", ["fsdp", "fsdp2_block", "fsdp1_block"])
def test_a_parameter_that_is_handed_to_a_block_is_expanded_first(cpu_ranks, how):
    for found in cpu_ranks.run(2, handed, how):
        assert "expand that to the batch" in found
