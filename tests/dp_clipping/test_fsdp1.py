"""FSDP1 with every mode: norms and clipped sums are those of one process in float64."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dp_clipping.model import PrivateModel
from dp_clipping.session import Session
from dp_clipping.sharded import Sharding
from tests.dp_clipping import oracle, zoo
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.dp_clipping.replicas import build, part, train
from tests.dp_clipping.test_fsdp2 import Counted, checkpointing
from tests.ranks import Context

LIMIT = 0.5
SPLITS = {1: [3], 2: [3, 2], 4: [2, 0, 1, 2]}  # samples of each rank: unequal, one without any
EMPTY = {2: [3, 0]}
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


def transformer() -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(d_ff=23)).double()


def shard(
    network: nn.Module, wrap: str, context: Context, strategy=FULL, original=True, **options
) -> FSDP:
    """FSDP1 around every block and the root, or around the root alone."""
    options |= {"sharding_strategy": strategy, "use_orig_params": original}
    options |= {"device_id": context.device}
    if wrap == "block":
        for n, block in enumerate(network.blocks):
            network.blocks[n] = FSDP(block, context.group, **options)
    return FSDP(network, context.group, **options)


def joined(part: Tensor, group: dist.ProcessGroup, shape: torch.Size) -> Tensor:
    """The parts of all ranks, one after the other."""
    parts: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part.flatten(), group=group)
    return torch.cat(parts).view(shape)


def sums(context: Context, model: PrivateModel) -> dict[str, Tensor]:
    """Name -> `.grad` of all ranks."""
    shapes, names = model.capture.shapes, model.capture.names
    return {names[p]: joined(p.grad, context.group, shapes[p]) for p in model.capture.parameters}


def one_step(context: Context, wrap: str, strategy, splits) -> None:
    counts = splits[context.world_size]
    batch = zoo.tokens(sum(counts), 6)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    mine = part(counts, context.rank)
    for mode in MODES:
        for clipping in ("flat", "per_layer"):
            expected = oracle.clipped_sum(gradients, LIMIT, clipping)
            network = shard(transformer(), wrap, context, strategy)
            before = list(network.parameters())
            model = private(network, mode, LIMIT, clipping)
            for _ in range(2):
                model.clear_gradients()
                private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
                model.finish_synchronization()
                found = model.per_sample_gradient_norms
                torch.testing.assert_close(found.double(), norms[mine], rtol=1e-7, atol=0)
                found = sums(context, model)
                assert list(found) == list(expected)
                for name, total in found.items():
                    torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)
            assert all(p is q for p, q in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("wrap", "strategy"),
    [
        ("block", FULL),
        ("root", GRAD_OP),
        pytest.param("root", FULL, marks=pytest.mark.slow),
        pytest.param("block", GRAD_OP, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_norms_and_sums(cpu_ranks, wrap, strategy):
    cpu_ranks.run(2, one_step, wrap, strategy, SPLITS)


def test_a_rank_without_samples(cpu_ranks):
    cpu_ranks.run(2, one_step, "block", FULL, EMPTY)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["block", "root"])
def test_norms_and_sums_on_four_ranks(cpu_ranks, wrap):
    cpu_ranks.run(4, one_step, wrap, FULL, SPLITS)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_one_rank(cpu_ranks):
    cpu_ranks.run(1, one_step, "block", FULL, SPLITS)


def every_network(context: Context) -> None:
    """Tied and reused weights, convolutions, adapters, library models, ..."""
    mine = slice(0, 3) if context.rank == 0 else slice(3, 4)
    wrong = []
    for case in zoo.CASES:
        scalars = any(p.dim() == 0 for p in case.build().parameters())  # FSDP1 refuses them
        if scalars or not all(importlib.util.find_spec(package) for package in case.needs):
            continue
        batch = oracle.move(case.batch(4), dtype=torch.float64)
        gradients = oracle.per_sample_gradients(case.build().double(), batch, case.per_sample_loss)
        norms = oracle.norms(gradients)
        limit = float(norms[norms.isfinite()].median())
        expected = oracle.clipped_sum(gradients, limit)
        scale = sum(g.norm() for g in expected.values())
        for mode in ("bookkeeping", "ghost"):
            model = private(shard(case.build().double(), "root", context), mode, limit)
            try:
                private_loss(model, oracle.pick(batch, mine), case.per_sample_loss).backward()
            except (ValueError, RuntimeError):
                if not case.or_refused:
                    raise
                continue
            model.finish_synchronization()
            errors = (model.per_sample_gradient_norms - norms[mine]).abs() / norms[mine]
            found = sums(context, model)
            assert list(found) == list(expected)
            differences = ((found[n] - g).norm() / scale for n, g in expected.items())
            if max(errors.max(), *differences) > 1e-5:
                wrong.append((case.name, mode))
    assert not wrong


@pytest.mark.slow
def test_the_zoo(cpu_ranks):
    cpu_ranks.run(2, every_network)


# ---- through the front door ----------------------------------------------------------------------


def values(run) -> list[Tensor]:
    network = run.model.network
    if not isinstance(network, FSDP):
        return [p.detach().clone() for p in network.parameters()]
    with FSDP.summon_full_params(network, writeback=False):
        return [p.detach().clone() for p in network.parameters()]


def trained(context: Context, mode: str, microbatch: int | None, strategy) -> list[Tensor]:
    """Parameters after some steps, and the same ones on every rank."""
    run = build(
        context, shard=lambda network: shard(network, "block", context, strategy),
        name="transformer", grad_sample_mode=mode,
    )  # fmt: skip
    train(run, 4, microbatch)
    return values(run)


@pytest.mark.parametrize(
    ("mode", "microbatch", "strategy"),
    [("bookkeeping", None, FULL), ("ghost", 1, FULL), ("bookkeeping", 1, GRAD_OP)],
)
def test_training_is_that_of_one_process(cpu_ranks, mode, microbatch, strategy):
    """Draws, noise of each part, momentum: nothing tells how many ranks there are."""
    alone = build(name="transformer", grad_sample_mode=mode)
    train(alone, 4)
    for found in cpu_ranks.run(2, trained, mode, microbatch, strategy):
        for one, other in zip(found, values(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# ---- what travels, and what is refused -----------------------------------------------------------


@contextmanager
def norm_passes(counted: Counted) -> Iterator[list[int]]:
    """How much has been reduced when coefficients are known, of each backward inside."""
    found: list[int] = []
    clip = Session._clip

    def clipping(session: Session, limits: Tensor) -> Tensor:
        found.append(counted.reductions)
        return clip(session, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_clip", clipping)
        yield found


def collectives(context: Context) -> None:
    """None that reduces in the norm pass; parameters are gathered as often as without privacy."""
    batch = zoo.tokens(2, 6)
    network = shard(transformer(), "block", context)
    for _ in range(2):
        with Counted() as ordinary:
            zoo.cross_entropy(network(batch[0]), batch[1]).sum().backward()
    units = 3  # two blocks and the root
    assert ordinary.reductions == units
    for mode, passes in (("bookkeeping", 1), ("per_sample", 1), ("ghost", 2)):
        model = private(shard(transformer(), "block", context), mode, LIMIT)
        for _ in range(2):
            model.clear_gradients()
            loss = private_loss(model, batch, zoo.cross_entropy)
            with Counted() as counted, norm_passes(counted) as in_norms:
                loss.backward()
                model.finish_synchronization()
        assert in_norms == [0]
        assert counted.reductions == units
        # The root stays whole after a forward, for the first backward.
        assert counted.gathers == passes * (units - 1) + passes - 1, (mode, counted.calls)


def test_collectives(cpu_ranks):
    cpu_ranks.run(2, collectives)


def gathered(context: Context, strategy) -> None:
    """A block's whole parameters are gone when backward is in the block before it."""
    batch = zoo.tokens(2, 6)
    for mode, passes in (("bookkeeping", 1), ("ghost", 2)):
        model = private(shard(transformer(), "block", context, strategy), mode, LIMIT)
        first, second = model.network.module.blocks
        there: list[list[int]] = []

        def sizes(_, units=(first, second), there=there) -> None:
            flat = [unit._handle.flat_param._full_param_padded for unit in units]
            there.append([bool(x.untyped_storage().size()) for x in flat])

        def watch(module, args, output, sizes=sizes) -> None:
            if output.requires_grad:
                output.register_hook(sizes)

        hook = first.module.feed_forward.register_forward_hook(watch)
        for _ in range(2):
            model.clear_gradients()
            private_loss(model, batch, zoo.cross_entropy).backward()
            model.finish_synchronization()
        hook.remove()
        assert there == [[True, False]] * 2 * passes, (mode, there)
        sizes(None)
        assert there[-1] == [False, False]


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda s: s.name)
def test_gathered_parameters_go(cpu_ranks, strategy):
    cpu_ranks.run(2, gathered, strategy)


def frozen(network: nn.Module) -> nn.Module:
    network.token_embedding.requires_grad_(False)
    network.blocks[0].attention.requires_grad_(False)
    network.blocks[1].requires_grad_(False)
    return network


def partly(context: Context, change) -> None:
    """Frozen layers, a unit of nothing else among them, or recomputed activations."""
    batch = zoo.tokens(4, 6)
    mine = oracle.pick(batch, slice(2 * context.rank, 2 * context.rank + 2))
    reference = frozen(transformer()) if change is frozen else transformer()
    gradients = oracle.per_sample_gradients(reference, batch, zoo.cross_entropy)
    expected = oracle.clipped_sum(gradients, LIMIT)
    for mode in MODES:
        model = private(shard(change(transformer()), "block", context), mode, LIMIT)
        for _ in range(2):
            model.clear_gradients()
            private_loss(model, mine, zoo.cross_entropy).backward()
            model.finish_synchronization()
            for name, total in sums(context, model).items():
                torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("change", [frozen, checkpointing])
def test_frozen_layers_and_recomputed_activations(cpu_ranks, change):
    cpu_ranks.run(2, partly, change)


def in_16_bit(context: Context) -> None:
    """Computed in bfloat16; norms, sums and what travels are float32."""
    batch = zoo.tokens(4, 6)
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    expected = oracle.clipped_sum(gradients, LIMIT)
    mine = slice(2 * context.rank, 2 * context.rank + 2)
    for mode in MODES:
        network = shard(transformer().float(), "block", context, mixed_precision=policy)
        model = private(network, mode, LIMIT)
        private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
        model.finish_synchronization()
        norms = model.per_sample_gradient_norms
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms.double(), oracle.norms(gradients)[mine], rtol=3e-2, atol=0)
        for name, total in sums(context, model).items():
            assert total.dtype == torch.float32
            error = (total.double() - expected[name]).norm()
            assert error <= 0.08 * expected[name].norm() + 1e-3, (mode, name)


def test_mixed_precision(cpu_ranks):
    cpu_ranks.run(2, in_16_bit)


class Outside(nn.Module):
    """A weight that is used where nothing captures it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + F.linear(x, self.a.weight)


def refused(context: Context) -> None:
    network = transformer()
    network.blocks[0] = FSDP(network.blocks[0], context.group, device_id=context.device)
    with pytest.raises(ValueError, match="wrap the root too"):
        Sharding.of(network)
    for options, message in (
        ({"original": False}, "use_orig_params=True"),
        ({"strategy": ShardingStrategy.NO_SHARD}, "FSDP1 with NO_SHARD"),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "leave parameters on the GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            Sharding.of(shard(transformer(), "block", context, **options))

    x = torch.randn(3, 4)
    model = private(shard(Outside(), "root", context), "bookkeeping")
    with pytest.raises(RuntimeError, match=r"a\.weight: used outside of the module"):
        private_loss(model, (x, x), zoo.product).backward()

    batch = zoo.tokens(2, 6)
    model = private(shard(transformer(), "block", context), "bookkeeping")
    private_loss(model, batch, zoo.cross_entropy).backward()
    zoo.cross_entropy(model.network(batch[0]), batch[1]).sum().backward()
    with pytest.raises(RuntimeError, match="an ordinary backward"):
        model.refuse_unclipped()
    model.clear_gradients()
    private_loss(model, batch, zoo.cross_entropy).backward()
    model.finish_synchronization()
    model.refuse_unclipped()
    # In a forward FSDP1 makes what is left there its own.
    model.close_step()
    loss = private_loss(model, batch, zoo.cross_entropy)
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
        loss.backward()


def test_refusals(cpu_ranks):
    cpu_ranks.run(2, refused)
