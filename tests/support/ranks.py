"""Layouts of a network on ranks: how it is replicated or sharded, and who has which samples.

`step_beside_one_process` compares norms and clipped sums of a layout with one ordinary backward per
sample in float64. `started` begins a run of `make_private` on a layout, or in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from ddp import wrap
from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.parallel import DATA, TENSOR, parallelize
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.model import PrivateModel
from dp_clipping.sampling.usage import Ticket
from dp_clipping.torch_compat import tree_map
from tests.ddp.conftest import CPU_COPY_ENGINE, HAND_BUILT
from tests.dp_clipping.conftest import (
    assert_close,
    gradients_of,
    private,
    private_loss,
    skip_all_checks,
    unit_gradients,
)
from tests.support import around_blocks, replicas, zoo
from tests.support.beside import small_buckets
from tests.support.meshes import square
from tests.support.private_steps import limits_of
from tests.support.sharded_steps import shard_fsdp2, whole_gradients, whole_parameters

Place = Callable[[Context, nn.Module], nn.Module]
LEAVES = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RNNBase)


def units_of(network: nn.Module, wrap: str) -> list[str]:
    """Returns the names of the modules that ranks gather by themselves, inner ones first."""
    if wrap == "root":
        return []
    is_unit = lambda module: isinstance(module, LEAVES)  # noqa: E731
    if wrap == "block":
        blocks = set(around_blocks.blocks(network))
        for parent, module in network.named_modules():
            if parent.rpartition(".")[2] == "blocks":
                blocks |= {f"{parent}.{name}" for name, _ in module.named_children()}
        return [name for name, _ in reversed([*network.named_modules()]) if name in blocks]
    return [name for name, module in network.named_modules() if name and is_unit(module)]


def fsdp2(context: Context, network: nn.Module, wrap: str = "block", **options) -> nn.Module:
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    for name in units_of(network, wrap):
        shard_fsdp2(network.get_submodule(name), "root", mesh, **options)
    return shard_fsdp2(network, "root", mesh, **options)


def fsdp1(
    context: Context,
    network: nn.Module,
    wrap: str = "block",
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    original: bool = True,
    **options,
) -> FSDP:
    options |= {"sharding_strategy": strategy, "use_orig_params": original}
    options |= {"device_id": context.device}
    for name in units_of(network, wrap):
        network.set_submodule(name, FSDP(network.get_submodule(name), context.group, **options))
    return FSDP(network, context.group, **options)


def tensor(context: Context, network: nn.Module) -> nn.Module:
    mesh = DeviceMesh.from_group(context.group, context.device.type, mesh_dim_names=(TENSOR,))
    return parallelize(network, mesh)


def fsdp2_x_tensor(context: Context, network: nn.Module) -> nn.Module:
    return parallelize(network, square(DATA, TENSOR))


def data_x_tensor(context: Context, network: nn.Module) -> nn.Module:
    return parallelize(network, square(DATA, TENSOR)[TENSOR])


def hybrid(context: Context, network: nn.Module) -> nn.Module:
    return shard_fsdp2(network, "block", square("replica", DATA))


def replicated(variant: str, **options) -> Place:
    def place(context: Context, network: nn.Module) -> nn.Module:
        small = small_buckets(variant, replicas.BUCKET_MB)
        return wrap(variant, network, process_group=context.group, **small, **options)

    return place


@dataclass(frozen=True)
class Layout:
    """Where a network is.

    Attributes:
        place: replicates or shards it.
        variant: its name in `ddp`, if it is of there.
        ranks: how many there are.
        share: neighbours that have the same samples, and parts of parameters.
        dtype: of parameters; sums of `ddp` travel in float32.
        options: of the private model.
    """

    place: Place
    variant: str | None = None
    ranks: int = 2
    share: int = 1
    dtype: torch.dtype = torch.float64
    options: Callable[[], dict[str, Any]] = dict


def of_variant(variant: str, **options) -> Layout:
    return Layout(replicated(variant, **options), variant, dtype=torch.float32)


GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
BFLOAT16 = torch.bfloat16
REPLICAS = {
    "alone on each": of_variant("none"),
    **{variant: of_variant(variant) for variant in HAND_BUILT},
    "copy engine": of_variant(CPU_COPY_ENGINE),
    "torch_ddp": of_variant("torch_ddp"),
    "torch_ddp_tuned": of_variant("torch_ddp_tuned"),
}
DIVIDED = {variant: of_variant(variant) for variant in ("zero1", "zero2", "fsdp")}
SHARDED = {
    "fsdp1 block": Layout(fsdp1),
    "fsdp1 root": Layout(partial(fsdp1, wrap="root", strategy=GRAD_OP)),
    "fsdp2 block": Layout(fsdp2),
    "fsdp2 leaf": Layout(partial(fsdp2, wrap="leaf")),
    "fsdp2 root": Layout(partial(fsdp2, wrap="root")),
    "tensor": Layout(tensor, share=2),
}
ON_FOUR = {
    "ddp_bucketed on four": Layout(
        replicated("ddp_bucketed"), "ddp_bucketed", ranks=4, dtype=torch.float32
    ),
    "fsdp2 on four": Layout(fsdp2, ranks=4),
    "data x tensor": Layout(
        data_x_tensor, ranks=4, share=2,
        options=lambda: {"data_parallel_group": square(DATA, TENSOR)[DATA].get_group()},
    ),
    "fsdp2 x tensor": Layout(fsdp2_x_tensor, ranks=4, share=2),
    "hybrid": Layout(hybrid, ranks=4),
}  # fmt: skip
OTHERS = {
    "fsdp1 block, SHARD_GRAD_OP": Layout(partial(fsdp1, strategy=GRAD_OP)),
    "fsdp1 on one": Layout(fsdp1, ranks=1),
    "fsdp2 on one": Layout(fsdp2, ranks=1),
    "fsdp1 in bfloat16": Layout(
        partial(fsdp1, mixed_precision=MixedPrecision(param_dtype=BFLOAT16)), dtype=torch.float32
    ),
    "fsdp2 in bfloat16": Layout(
        partial(fsdp2, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16)), dtype=torch.float32
    ),
    "fsdp in bfloat16": of_variant("fsdp", param_dtype=BFLOAT16),
    "torch_zero1": of_variant("torch_zero1"),
}
LAYOUTS: dict[str, Layout] = REPLICAS | DIVIDED | SHARDED | ON_FOUR | OTHERS


# Steps beside one process


SPLITS = {1: [5], 2: [3, 2], 4: [2, 0, 1, 2]}
"""Samples, or units, of each rank that has its own: unequal, one of four without any."""
K = 2  # examples of a unit


def uneven() -> nn.Module:
    """A transformer whose wide layers have 23 rows, on 2 or 4 ranks."""
    return zoo.seeded(lambda: zoo.transformer(d_ff=23))


def even() -> nn.Module:
    """One that a tensor axis divides."""
    return zoo.seeded(lambda: zoo.transformer(d_ff=24))


def frozen() -> nn.Module:
    """Some layers beside trained ones, and a block of nothing else."""
    network = uneven()
    network.token_embedding.requires_grad_(False)
    network.blocks[0].attention.requires_grad_(False)
    network.blocks[1].requires_grad_(False)
    return network


def norms_alone() -> nn.Module:
    """Only what every tensor rank has whole is trained."""
    network = even()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("norm" in name)
    return network


def recomputed() -> nn.Module:
    """Blocks that keep nothing for backward but their input."""
    network = even()
    for block in network.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return network


def compiled() -> nn.Module:
    """Each block by itself."""
    network = even()
    for block in network.blocks:
        block.compile()
    return network


OWN = {
    "uneven": uneven,
    "even": even,
    "frozen": frozen,
    "norms alone": norms_alone,
    "recomputed": recomputed,
    "compiled": compiled,
}


def case_of(name: str) -> zoo.Case:
    """Returns a network of here, of those around blocks, or of the zoo."""
    if name in OWN:
        return zoo.Case(name, OWN[name], lambda b: zoo.tokens(b, 6), zoo.cross_entropy)
    if name in around_blocks.NETWORKS | around_blocks.REFUSED:
        build = lambda: around_blocks.make(name)  # noqa: E731
        return zoo.Case(name, build, lambda b: zoo.classes(b, 6, 5), zoo.cross_entropy)
    return zoo.BY_NAME[name]


@cache
def gradients_alone(name: str, count: int, dtype: torch.dtype) -> oracle.Gradients:
    case = case_of(name)
    network = even() if name in ("recomputed", "compiled") else case.build()
    batch = oracle.move(case.batch(count), dtype=dtype)
    return oracle.per_sample_gradients(network.to(dtype), batch, case.per_sample_loss)


TOLERANCES = {torch.float64: 1e-6, torch.float32: 4e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Way:
    """A network on a layout, and how its steps are made.

    Attributes:
        name: of the network.
        layout: in `LAYOUTS`.
        units: `K` examples are one unit of privacy.
        looks: for samples that see each other, which takes longer than all steps.
        dtype: of parameters, where it is not the layout's.
        tolerance: where it is not the dtype's.
    """

    layout: str
    name: str = "uneven"
    mode: str = "bookkeeping"
    clipping: str = "flat"
    reduction: str = "sync"
    units: bool = False
    looks: bool = False
    dtype: torch.dtype | None = None
    tolerance: float | None = None


def totals(model: PrivateModel) -> dict[str, Tensor]:
    """Returns `.grad` by name, with the parts of all ranks."""
    is_of_torch = model.sharding is not None and not hasattr(model.module, "whole_gradients")
    return whole_gradients(model) if is_of_torch else gradients_of(model)


def part_of(x: Tensor, rows: slice, zeros: int) -> Tensor:
    """Returns these rows of a tensor, and behind them rows of zeros."""
    return torch.cat((x[rows], torch.zeros_like(x[:zeros])))


def step_beside_one_process(context: Context, way: Way) -> None:
    """Two steps: the samples as the ranks have them; then others, and behind them rows of zeros
    that no sample is in."""
    layout = LAYOUTS[way.layout]
    name = "even" if way.name == "uneven" and layout.share > 1 else way.name
    case = case_of(name)
    dtype = way.dtype or layout.dtype
    tolerance = way.tolerance or TOLERANCES[dtype]
    counts = SPLITS[layout.ranks // layout.share]
    size = K if way.units else 1
    batch = oracle.move(case.batch(size * sum(counts)), dtype=dtype)
    gradients = gradients_alone(name, size * sum(counts), dtype)
    if way.units:
        gradients = unit_gradients(gradients, K)
    limits = limits_of(gradients, way.clipping)
    network = layout.place(context, case.build().to(context.device, dtype))
    before = list(network.parameters())
    options = layout.options() | {"norm_reduction": way.reduction}
    if way.units:
        options["rows_per_unit"] = K
    model = private(network, way.mode, limits, way.clipping, **options)
    if not way.looks:
        skip_all_checks(model)
    for step, split in enumerate((counts, [sum(counts), *[0] * (len(counts) - 1)])):
        own = replicas.part(split, context.rank // layout.share)
        rows = slice(size * own.start, size * own.stop)
        zeros = 0 if way.units else 2 * step
        real = rows.stop - rows.start
        model.clear_gradients()
        model.step_state.usage.ticket = Ticket(real, rows=real + zeros)
        mine = tree_map(partial(part_of, rows=rows, zeros=zeros), batch)
        mine = oracle.move(mine, device=context.device)
        private_loss(model, mine, case.per_sample_loss).backward()
        model.finish_synchronization()
        found = model.per_sample_gradient_norms.double().cpu()
        torch.testing.assert_close(found, oracle.norms(gradients)[own], rtol=tolerance, atol=1e-9)
        whose = oracle.pick(gradients, own) if way.layout == "alone on each" else gradients
        expected = oracle.clipped_sum(whose, limits, way.clipping)
        sums = {name: total.cpu() for name, total in totals(model).items()}
        assert_close(sums, expected, tolerance)
    assert all(p is q for p, q in zip(network.parameters(), before, strict=True))


# Runs


def started(context: Context | None, layout: str | None, **options: Any) -> SimpleNamespace:
    """Returns a run of `make_private` on a layout, or in one process without ranks."""
    if context is None or layout is None:
        return replicas.build(**options)
    where = LAYOUTS[layout]
    if where.variant is not None:
        return replicas.build(context, where.variant, **options)
    return replicas.build(
        context, shard=partial(where.place, context), **where.options(), **options
    )


def values(run: SimpleNamespace) -> np.ndarray:
    """Returns all parameters, whole on every rank."""
    model = run.optimizer.model
    is_of_torch = model.sharding is not None and not hasattr(model.module, "whole_parameters")
    return replicas.flat(whole_parameters(run)) if is_of_torch else replicas.parameters(run)
