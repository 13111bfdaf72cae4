"""FSDP2 with every mode: norms and clipped sums are those of one process in float64."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dp_clipping import fused
from dp_clipping.adaptive import AdaptiveThreshold
from dp_clipping.session import Session
from dp_clipping.sharded import Sharding
from lm.parallel import parallelize
from tests.dp_clipping import oracle, zoo
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.dp_clipping.replicas import build, part, train
from tests.dp_clipping.sharded import WRAPS, shard_fsdp2, whole
from tests.ranks import Context, RankPool

ROOT = Path(__file__).parents[2]
LIMIT = 0.5
SPLITS = {2: [3, 2], 4: [2, 0, 1, 2]}  # samples of each rank: unequal, one without any


def transformer() -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(d_ff=23)).double()  # 23 rows on 2 or 4 ranks


def one_step(context: Context, wrap: str) -> None:
    counts = SPLITS[context.world_size]
    batch = zoo.tokens(sum(counts), 6)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    first = sum(counts[: context.rank])
    mine = slice(first, first + counts[context.rank])
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    for mode in MODES:
        for clipping in ("flat", "per_layer"):
            expected = oracle.clipped_sum(gradients, LIMIT, clipping)
            model = private(shard_fsdp2(transformer(), wrap, mesh), mode, LIMIT, clipping)
            for _ in range(2):
                model.clear_gradients()
                private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
                model.finish_synchronization()
                found = model.per_sample_gradient_norms
                torch.testing.assert_close(found.double(), norms[mine], rtol=1e-7, atol=0)
                for name, parameter in model.network.named_parameters():
                    total = whole(parameter.grad)
                    torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("wrap", WRAPS)
def test_norms_and_sums(cpu_ranks, wrap):
    cpu_ranks.run(2, one_step, wrap)


@pytest.mark.parametrize("wrap", ["block", pytest.param("leaf", marks=pytest.mark.slow)])
def test_norms_and_sums_on_four_ranks(cpu_ranks, wrap):
    cpu_ranks.run(4, one_step, wrap)


def every_network(context: Context) -> None:
    """Tied and reused weights, position ids without a batch, adapters, library models, ..."""
    mesh = DeviceMesh.from_group(context.group, "cpu")
    mine = slice(0, 3) if context.rank == 0 else slice(3, 4)
    wrong = []
    for case in zoo.CASES:
        scalars = any(p.dim() == 0 for p in case.build().parameters())  # fully_shard refuses them
        if scalars or not all(importlib.util.find_spec(package) for package in case.needs):
            continue
        batch = oracle.move(case.batch(4), dtype=torch.float64)
        gradients = oracle.per_sample_gradients(case.build().double(), batch, case.per_sample_loss)
        norms = oracle.norms(gradients)
        limit = float(norms[norms.isfinite()].median())
        expected = oracle.clipped_sum(gradients, limit)
        scale = sum(g.norm() for g in expected.values())
        for mode in ("bookkeeping", "ghost"):
            model = private(fully_shard(case.build().double(), mesh=mesh), mode, limit)
            try:
                private_loss(model, oracle.pick(batch, mine), case.per_sample_loss).backward()
            except (ValueError, RuntimeError):
                if not case.or_refused:
                    raise
                continue
            model.finish_synchronization()
            errors = (model.per_sample_gradient_norms - norms[mine]).abs() / norms[mine]
            found = [(n, p) for n, p in model.network.named_parameters() if p.requires_grad]
            sums = [(whole(p.grad) - expected[n]).norm() / scale for n, p in found]
            if max(errors.max(), *sums) > 1e-5:
                wrong.append((case.name, mode))
    assert not wrong


@pytest.mark.slow
def test_the_zoo(cpu_ranks):
    cpu_ranks.run(2, every_network)


# ---- through the front door ----------------------------------------------------------------------


def sharded(context: Context, wrap: str = "block", **options):
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    return lambda network: shard_fsdp2(network, wrap, mesh, **options)


def values(run) -> list[torch.Tensor]:
    return [whole(p).detach().clone() for p in run.model.network.parameters()]


def trained(context: Context, mode: str, microbatch: int | None) -> list[torch.Tensor]:
    """Parameters after some steps, and the same ones on every rank."""
    run = build(context, shard=sharded(context), name="transformer", grad_sample_mode=mode)
    train(run, 4, microbatch)
    return values(run)


@pytest.mark.parametrize(("mode", "microbatch"), [("bookkeeping", None), ("ghost", 1)])
def test_training_is_that_of_one_process(cpu_ranks, mode, microbatch):
    """Draws, noise of each shard, momentum: nothing tells how many ranks there are."""
    alone = build(name="transformer", grad_sample_mode=mode)
    train(alone, 4)
    for found in cpu_ranks.run(2, trained, mode, microbatch):
        for one, other in zip(found, values(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# ---- the view of all ranks -----------------------------------------------------------------------


def adapted(context: Context | None, path: str | None = None):
    """Threshold, parameters and statistics after steps whose C follows the norms."""
    shard = None if context is None else sharded(context)
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
    return threshold.max_grad_norm, seen, values(run)


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
    """The last two of five steps, from the checkpoint of another number of ranks."""
    threshold = AdaptiveThreshold(0.7, expected_batch_size=4, quantile=0.4, count_std=6.0)
    run = build(
        context, shard=sharded(context), name="transformer", adaptive_threshold=threshold, seed=None
    )
    run.engine.load_checkpoint(
        path=path, module=run.model, optimizer=run.optimizer, data_loader=run.loader
    )
    train(run, 2)
    return threshold.max_grad_norm, run.optimizer.steps, values(run)


def test_a_run_goes_on_with_fewer_ranks(cpu_ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    (limit, _, expected), *_ = cpu_ranks.run(4, adapted, path)
    for found_limit, steps, found in cpu_ranks.run(2, resumed, path):
        assert (found_limit, steps) == (pytest.approx(limit, rel=1e-6), 5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# ---- what FSDP can be told -----------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """How often which collective is issued inside, by its name."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def gathers(self) -> int:
        return sum("gather" in name for name in self.calls)

    @property
    def reductions(self) -> int:
        return sum("reduce" in name for name in self.calls)


def collectives(context: Context) -> None:
    """None that reduces in the norm pass; parameters are gathered as often as without privacy."""
    batch = zoo.tokens(2, 6)
    shard = sharded(context)
    network = shard(transformer())
    for _ in range(2):
        with Counted() as ordinary:
            zoo.cross_entropy(network(batch[0]), batch[1]).sum().backward()
    units = 3  # two blocks and the root
    assert ordinary.reductions >= units
    for mode, passes in (("bookkeeping", 1), ("per_sample", 1), ("ghost", 2)):
        model = private(shard(transformer()), mode, LIMIT)
        in_norms = []
        clip = Session._clip

        def clipping(session, limits, clip=clip, in_norms=in_norms):
            in_norms.append(counted.reductions)
            return clip(session, limits)

        Session._clip = clipping
        try:
            for _ in range(2):
                model.clear_gradients()
                with Counted() as counted:
                    private_loss(model, batch, zoo.cross_entropy).backward()
                    model.finish_synchronization()
        finally:
            Session._clip = clip
        assert in_norms == [0, 0]
        assert counted.reductions == units
        backward = ordinary.gathers - units
        # A second backward gathers the root too, which stays whole after a forward.
        assert counted.gathers <= units + passes * backward + (passes - 1), (mode, counted.gathers)


def test_collectives(cpu_ranks):
    cpu_ranks.run(2, collectives)


def in_16_bit(context: Context) -> None:
    """Computed in bfloat16; norms, sums and what travels are float32."""
    batch = zoo.tokens(4, 6)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
    mine = slice(2 * context.rank, 2 * context.rank + 2)
    for mode in MODES:
        network = sharded(context, mp_policy=policy)(transformer().float())
        model = private(network, mode, LIMIT)
        private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
        model.finish_synchronization()
        norms = model.per_sample_gradient_norms
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms.double(), oracle.norms(gradients)[mine], rtol=3e-2, atol=0)
        expected = oracle.clipped_sum(gradients, LIMIT)
        for name, parameter in model.network.named_parameters():
            assert parameter.grad.dtype == torch.float32
            error = (whole(parameter.grad).double() - expected[name]).norm()
            assert error <= 0.08 * expected[name].norm() + 1e-3, (mode, name)


def test_mixed_precision(cpu_ranks):
    cpu_ranks.run(2, in_16_bit)


def partly(context: Context) -> None:
    """Recomputed activations and frozen layers."""
    batch = zoo.tokens(4, 6)
    mine = oracle.pick(batch, slice(2 * context.rank, 2 * context.rank + 2))

    def frozen(network):
        network.token_embedding.requires_grad_(False)
        network.blocks[0].attention.requires_grad_(False)
        return network

    for change in (frozen, checkpointing):
        reference = frozen(transformer()) if change is frozen else transformer()
        gradients = oracle.per_sample_gradients(reference, batch, zoo.cross_entropy)
        expected = oracle.clipped_sum(gradients, LIMIT)
        for mode in MODES:
            model = private(sharded(context)(change(transformer())), mode, LIMIT)
            private_loss(model, mine, zoo.cross_entropy).backward()
            model.finish_synchronization()
            found = {n: p for n, p in model.network.named_parameters() if p.requires_grad}
            assert list(found) == list(expected)
            for name, parameter in found.items():
                total = whole(parameter.grad)
                torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)


def checkpointing(network: nn.Module) -> nn.Module:
    """Blocks that keep nothing for backward but their input."""
    for block in network.blocks:
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    return network


def test_frozen_layers_and_recomputed_activations(cpu_ranks):
    cpu_ranks.run(2, partly)


def failed(context: Context) -> None:
    """Forward and backward fail half-way on all ranks; the steps after are right."""
    batch = zoo.tokens(4, 6)
    mine = oracle.pick(batch, slice(2 * context.rank, 2 * context.rank + 2))
    for mode in ("bookkeeping", "ghost"):
        gradients = oracle.per_sample_gradients(transformer(), batch, zoo.cross_entropy)
        expected = oracle.clipped_sum(gradients, LIMIT)
        model = private(sharded(context)(transformer()), mode, LIMIT)
        for step in range(4):
            if step == 1:
                hook = model.network.blocks[0].register_forward_hook(fail_in_backward)
            if step == 2:
                hook = model.network.blocks[1].register_forward_pre_hook(fail)
            if step in (1, 2):
                with pytest.raises(ArithmeticError):
                    private_loss(model, mine, zoo.cross_entropy).backward()
                hook.remove()
                continue
            private_loss(model, mine, zoo.cross_entropy).backward()
            model.finish_synchronization()
            for name, parameter in model.network.named_parameters():
                total = whole(parameter.grad)
                torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)
            model.clear_gradients()
            with torch.no_grad():  # other values than those that a gathered root would have
                for parameter in model.network.parameters():
                    parameter.mul_(1.25)
            changed = transformer()
            with torch.no_grad():
                for parameter in changed.parameters():
                    parameter.mul_(1.25)
            gradients = oracle.per_sample_gradients(changed, batch, zoo.cross_entropy)
            expected = oracle.clipped_sum(gradients, LIMIT)


def fail(*_):
    raise ArithmeticError("failed on purpose")


def fail_in_backward(module, args, output):
    output.register_hook(fail)


def test_a_step_after_a_failed_one(cpu_ranks):
    cpu_ranks.run(2, failed)


# ---- what is refused -----------------------------------------------------------------------------


def refused(context: Context) -> None:
    mesh = DeviceMesh.from_group(context.group, "cpu")
    network = transformer()
    fully_shard(network.blocks[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"blocks\.0, but not to the module itself"):
        Sharding.of(network)

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(x) + F.linear(x, self.a.weight)

    model = private(fully_shard(Outside(), mesh=mesh), "bookkeeping")
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=r"a\.weight: used outside of the module"):
        private_loss(model, (x, x), zoo.product).backward()

    batch = zoo.tokens(2, 6)
    model = private(sharded(context)(transformer()), "bookkeeping")
    private_loss(model, batch, zoo.cross_entropy).backward()
    model.finish_synchronization()
    zoo.cross_entropy(model.network(batch[0]), batch[1]).sum().backward()
    with pytest.raises(RuntimeError, match="an ordinary backward"):
        model.refuse_unclipped()


def test_refusals(cpu_ranks):
    cpu_ranks.run(2, refused)


# ---- on fused kernels, in the interpreter --------------------------------------------------------


def fused_step(context: Context) -> None:
    """One float32 step of each fused mode: per layer, sums leave while backward gathers, those of
    one FSDP module after the other or of several together."""
    counts = SPLITS[context.world_size]
    batch = zoo.tokens(sum(counts), 6)
    single = lambda: zoo.seeded(zoo.transformer)  # noqa: E731
    gradients = oracle.per_sample_gradients(single(), batch, zoo.cross_entropy)
    norms = oracle.norms(gradients)
    mine = part(counts, context.rank)
    cases = [
        (*case, fused.UNIT_BYTES)
        for case in product(
            ("flash_bookkeeping", "flash"), ("flat", "per_layer"), ("fsdp2", "tensor")
        )
    ]
    cases += [("flash_bookkeeping", "per_layer", how, 0) for how in ("fsdp2", "tensor")]
    cases += [("flash", "flat", "fsdp2", 0)]
    for mode, clipping, how, fused.UNIT_BYTES in cases:
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
        private_loss(model, oracle.pick(batch, own), zoo.cross_entropy).backward()
        model.finish_synchronization()
        if how == "fsdp2":
            assert len(left_in_backward) == (
                len(model.sharding.units) if not fused.UNIT_BYTES else 0
            )
        assert "predicted ms" in model.plan_table()  # a fused session it was
        torch.testing.assert_close(
            model.per_sample_gradient_norms.double(), norms[own], rtol=2e-5, atol=0
        )
        for name, parameter in model.network.named_parameters():
            total = whole(parameter.grad).double()
            torch.testing.assert_close(total, expected[name], rtol=0, atol=4e-5)


def note_departures(model) -> list[int]:
    """Grows with each FSDP module whose sums leave while a backward is under way."""
    left, launch = [], model._sharded_sums._launch

    def noted(parameters, totals):
        if model.last_session._in_backward:
            left.append(len(parameters))
        launch(parameters, totals)

    model._sharded_sums._launch = noted
    return left


def interpreted() -> None:
    pool = RankPool(2)
    pool.run(2, fused_step)
    pool.close()


@pytest.mark.slow
def test_fused_in_the_interpreter():
    pytest.importorskip("triton")
    command = (
        "from tests.dp_clipping import test_fsdp2 as t\nif __name__ == '__main__': t.interpreted()"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=400,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
