"""Per-sample gradients of the parts that tensor parallel gives a rank are slices of the whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.parallel import TENSOR, parallelize
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from dp_clipping.step.sums.plain import Plain
from tests.dp_clipping.conftest import MODES, private, private_loss
from tests.support import zoo
from tests.support.on_ranks import on_ranks
from tests.support.sharded_steps import one_step, whole

FLOAT32 = 1e-5  # rotary positions, and the norms of Hugging Face, compute in float32


def tensor_mesh(context: Context) -> DeviceMesh:
    return DeviceMesh.from_group(context.group, context.device.type, mesh_dim_names=(TENSOR,))


@contextmanager
def recorded(found: dict[str, Tensor]) -> Iterator[None]:
    """Inside, G of every parameter is also put here, whichever way it is handed over."""
    right = Plain._each

    def seen(self, lefts):
        each = right(self, lefts)
        for record, value, _ in each:
            is_dense = isinstance(value, Tensor)
            found[record.name] = value.clone() if is_dense else value.dense()
            if not is_dense:
                torch.testing.assert_close(value.norm().squared, squares(value.dense()))
        return each

    with patch.object(Plain, "_each", seen):
        yield


def squares(gradients: Tensor) -> Tensor:
    return oracle.per_sample_sum(gradients.square())


def part(gradients: Tensor, parameter: nn.Parameter, context: Context) -> Tensor:
    """Of G [B, *parameter], what belongs to this rank."""
    if not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate():
        return gradients
    dim = parameter.placements[0].dim + 1
    return gradients.chunk(context.world_size, dim)[context.rank]


def is_whole(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate()


def check_parts(
    context: Context, build: Callable, shard: Callable, batch, loss, modes=MODES, tolerance=1e-12
) -> None:
    """Also that squared norms add up over ranks, those of replicated parameters counted once."""
    expected = oracle.per_sample_gradients(build(), batch, loss)
    scale = max(float(g.abs().max()) for g in expected.values())
    for mode in modes:
        network = shard(build())
        model = private(network, mode)
        if mode != modes[-1]:  # samples that see each other are looked for in one mode
            model.skip_checks()
        for _ in range(2):
            found: dict[str, Tensor] = {}
            model.clear_gradients()
            with recorded(found):
                private_loss(model, batch, loss).backward()
            assert sorted(found) == sorted(expected)
            total = torch.zeros(len(batch[1]), dtype=torch.float64)
            for name, gradients in found.items():
                parameter = network.get_parameter(name)
                torch.testing.assert_close(
                    gradients,
                    part(expected[name], parameter, context),
                    rtol=0,
                    atol=tolerance * scale,
                    msg=lambda m, n=f"{mode}, {name}": f"{n}: {m}",
                )
                if context.rank == 0 or not is_whole(parameter):
                    total += squares(gradients)
            torch.distributed.all_reduce(total, group=context.group)
            torch.testing.assert_close(total.sqrt(), oracle.norms(expected), rtol=tolerance, atol=0)


class Layers(nn.Module):
    """One of each kind, with biases, and sizes of which ranks get unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 8, padding_idx=7)
        self.columns = nn.Embedding(11, 8, padding_idx=2)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 12)
        self.narrow = nn.Linear(12, 8)
        self.last_norm = nn.RMSNorm(8)
        self.last = nn.Linear(8, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.rows(ids) + self.columns(ids))
        x = x + self.narrow(self.wide(x).tanh())
        return self.last(self.last_norm(x))


def split_layers(network: Layers, mesh: DeviceMesh) -> nn.Module:
    """Also layers whose parameters are DTensors with all of them on each rank."""
    plan = {
        "rows": RowwiseParallel(input_layouts=Replicate()),
        "columns": ColwiseParallel(output_layouts=Replicate()),
        "wide": ColwiseParallel(),
        "narrow": RowwiseParallel(),
        "last_norm": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
        "last": ColwiseParallel(output_layouts=Replicate()),
    }
    network = parallelize_module(network, mesh, plan)
    weight = DTensor.from_local(network.last_norm.weight.detach(), mesh, [Replicate()])
    network.last_norm.weight = nn.Parameter(weight)
    return network


def build_layers() -> nn.Module:
    return zoo.seeded(Layers).double()


def ids_and_targets(size: int = 3, length: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (size, length), generator=draw)
    ids[:, length // 2] = ids[:, 0]
    ids[0, 3:] = 7
    ids[-1, 4:] = 2
    return ids, torch.randn(size, length, 7, generator=draw)


def partly_frozen() -> nn.Module:
    """Of split layers the biases are left, and nothing below them."""
    network = build_layers()
    for name, parameter in network.named_parameters():
        parameter.requires_grad = name.startswith("last_norm") or name.endswith(
            ("wide.bias", "narrow.bias", "last.bias")
        )
    return network


def tied_transformer() -> nn.Module:
    changes = {"num_layers": 1, "tie_embeddings": True}
    return zoo.seeded(lambda: zoo.transformer(**changes)).double()


def llama() -> nn.Module:
    changes = {"attention_bias": True, "mlp_bias": True}
    return zoo.seeded(lambda: zoo.llama("LlamaForSequenceClassification", **changes)).double()


NETWORKS = {  # as `ddp_by_hand.lm.parallel` divides them; norms and sums are in ranks/test_steps.py
    "tied transformer": (tied_transformer, lambda: zoo.tokens(3, 6), MODES),
    "llama": (llama, lambda: zoo.keywords(3, 6, 3), ("per_sample", "bookkeeping")),
}


def parallel(context: Context, name: str) -> None:
    (build, batch, modes), mesh = NETWORKS[name], tensor_mesh(context)
    check_parts(
        context, build, lambda network: parallelize(network, mesh), batch(), zoo.cross_entropy,
        modes, tolerance=FLOAT32,
    )  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(cpu_ranks, name):
    if name == "llama":
        pytest.importorskip("transformers")
    cpu_ranks.run(2, parallel, name)


def every_layer(context: Context) -> None:
    mesh = tensor_mesh(context)
    everything = (
        (build_layers, ids_and_targets()),
        (build_layers, ids_and_targets(1, 1)),
        (partly_frozen, ids_and_targets()),
    )
    for build, batch in everything[: 1 if context.world_size == 1 else 3]:
        check_parts(context, build, lambda n: split_layers(n, mesh), batch, zoo.product)


@pytest.mark.parametrize(
    "ranks", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_every_kind_of_layer(cpu_ranks, ranks):
    cpu_ranks.run(ranks, every_layer)


@on_ranks(2)
def test_two_passes_in_16_bit(context: Context) -> None:
    """Compares clipped sums of modes with one and with two backward passes."""
    batch = torch.randn(3, 5, 8).bfloat16(), torch.randn(3, 5, 8)
    sums = {}
    for mode in ("bookkeeping", "ghost", "flash"):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).bfloat16()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = private(parallelize_module(network, tensor_mesh(context), plan), mode, 0.5)
        one_step(model, batch, zoo.product)
        sums[mode] = torch.cat([whole(p.grad).flatten() for p in network.parameters()])
    for mode, total in sums.items():
        torch.testing.assert_close(total, sums["bookkeeping"], rtol=0.02, atol=2e-3, msg=mode)


# ---- refusals -----------------------------------------------------------------------------------


def step(network: nn.Module, batch, loss=zoo.product) -> None:
    private_loss(private(network), batch, loss).backward()


@on_ranks(2)
def test_sequence_parallel_is_refused(context: Context) -> None:
    """Norms that are named in the plan."""
    network = nn.Sequential(nn.LayerNorm(4)).double()
    plan = {"0": SequenceParallel(use_local_output=True)}
    network = parallelize_module(network, tensor_mesh(context), plan)
    inputs, targets = zoo.numbers(3, 5, 4, out=(5, 4))
    with pytest.raises(ValueError, match=r"0: its input \[3, 10, 4\] is sharded on dimension 1"):
        step(network, (inputs.double(), targets))


@on_ranks(2)
def test_sequence_parallel_around_plain_layers_is_refused(context: Context) -> None:
    """A norm between them is a plain layer with some of the tokens: its neighbours show it."""
    plan = {
        "rows": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "columns": ColwiseParallel(output_layouts=Shard(1)),
        "wide": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Shard(1)),
        "last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    network = parallelize_module(build_layers(), tensor_mesh(context), plan)
    with pytest.raises(ValueError, match=r"rows: .* gather or scatter"):
        step(network, ids_and_targets(3, 4))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@on_ranks(2)
def test_other_layouts_are_refused_by_name(context: Context) -> None:
    mesh = tensor_mesh(context)
    batch = zoo.numbers(3, 4, out=(4,))

    def build(*members: nn.Module) -> nn.Sequential:
        return nn.Sequential(*members)

    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    network = parallelize_module(build(nn.Linear(4, 1)), mesh, plan)
    with pytest.raises(ValueError, match="leave the last of 2 ranks none"):
        step(network, zoo.numbers(3, 4, out=(1,)))
    bare = build(
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())._apply(
            Bare(), mesh
        )
    )
    bare[0].scale = nn.Parameter(DTensor.from_local(bare[0].scale.detach(), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"0 is given DTensors, .* linear layers, embeddings"):
        step(bare, batch)


class HeadNorm(nn.Module):
    """A norm over each head, which a rank applies to the heads that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head, self.narrow = (nn.Linear(6, 8), nn.RMSNorm(4), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wide(x).unflatten(-1, (-1, 4))
        return self.narrow(self.head(heads).flatten(-2))


@on_ranks(2)
def test_a_shared_parameter_of_a_part_of_its_input_is_refused(context: Context) -> None:
    """Each rank would hold a term of its gradient, and the norm would be too small."""
    mesh, plan = tensor_mesh(context), {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    batch = zoo.numbers(4, 5, 6, out=(5, 3))
    for how, mode in product(NORM_REDUCTIONS, MODES):
        model = private(parallelize_module(HeadNorm(), mesh, plan), mode, norm_reduction=how)
        with pytest.raises(RuntimeError, match="not split over the tensor-parallel axis"):
            private_loss(model, batch, zoo.product).backward()
    network = HeadNorm()
    network.head.requires_grad_(False)
    step(parallelize_module(network, mesh, plan), batch)
