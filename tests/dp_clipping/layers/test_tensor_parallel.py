"""Norms and sums of layers that tensor parallel divides; networks are in `ranks/test_steps.py`."""

import copy

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
from ddp_by_hand.lm.parallel import TENSOR
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from tests.dp_clipping.conftest import MODES, assert_close, private, private_loss
from tests.support import zoo
from tests.support.on_ranks import on_ranks
from tests.support.sharded_steps import one_step, whole


def tensor_mesh(context: Context) -> DeviceMesh:
    return DeviceMesh.from_group(context.group, context.device.type, mesh_dim_names=(TENSOR,))


def check_steps(network: nn.Module, plain: nn.Module, batch, mode: str) -> None:
    """Compares norms and whole clipped sums of two steps with one ordinary backward a sample."""
    gradients = oracle.per_sample_gradients(plain, batch, zoo.product)
    norms = oracle.norms(gradients)
    limit = float(norms.median())
    model = private(network, mode, limit)
    for _ in range(2):
        model.clear_gradients()
        one_step(model, batch, zoo.product)
        found = model.per_sample_gradient_norms.double()
        torch.testing.assert_close(found, norms, rtol=1e-9, atol=0)
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        sums = {name: whole(p.grad) for name, p in named}
        assert_close(sums, oracle.clipped_sum(gradients, limit), 1e-9)


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


def every_layer(context: Context) -> None:
    mesh = tensor_mesh(context)
    everything = (
        (build_layers, ids_and_targets()),
        (build_layers, ids_and_targets(1, 1)),
        (partly_frozen, ids_and_targets()),
    )
    for n, (build, batch) in enumerate(everything[: 1 if context.world_size == 1 else 3]):
        in_one = n > 0 and context.world_size == 2  # more ranks try each in all modes
        for mode in MODES[n : n + 1] if in_one else MODES:
            check_steps(split_layers(build(), mesh), build(), batch, mode)


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


@pytest.mark.parametrize("placement", [Replicate(), Shard(-1)], ids=str)
@on_ranks(2)
def test_a_model_that_returns_a_dtensor_is_refused(context: Context, placement) -> None:
    """As for `loss_parallel`. What the message says works."""
    plan = {"0": ColwiseParallel(output_layouts=placement, use_local_output=False)}
    network = parallelize_module(nn.Sequential(nn.Linear(4, 3)), tensor_mesh(context), plan)
    batch = zoo.numbers(3, 4, out=(3,))
    with pytest.raises(ValueError, match=r"returns a DTensor.*output_layouts=Replicate\(\)"):
        step(network, batch)
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    step(parallelize_module(nn.Sequential(nn.Linear(4, 3)), tensor_mesh(context), plan), batch)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Around(nn.Module):
    """Adds a parameter beside layers that ranks divide, itself or by a module."""

    def __init__(self, is_apart: bool) -> None:
        super().__init__()
        self.shift = Shift() if is_apart else None
        self.by = None if is_apart else nn.Parameter(torch.linspace(-1, 1, 4))
        self.wide, self.narrow = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.by if self.shift is None else self.shift(x)
        return self.narrow(self.wide(x).tanh())


@on_ranks(2)
def test_a_parameter_beside_layers_of_the_plan_needs_a_module(context: Context) -> None:
    batch = zoo.numbers(4, 4, out=(3,))
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    for is_apart in (False, True):
        plain = Around(is_apart).double()
        network = parallelize_module(copy.deepcopy(plain), tensor_mesh(context), plan)
        if is_apart:
            check_steps(network, plain, batch, "flash_bookkeeping")
        else:
            with pytest.raises(ValueError, match="move those to a module without such layers"):
                one_step(private(network, "flash_bookkeeping", 1.0), batch, zoo.product)


class HeadNorm(nn.Module):
    """A norm over each head, which a rank applies to the heads that it has, beside a layer."""

    def __init__(self, beside: float = 1.0) -> None:
        super().__init__()
        self.wide, self.head, self.narrow = (nn.Linear(6, 8), nn.RMSNorm(4), nn.Linear(8, 3))
        self.last, self.beside = nn.Linear(6, 3), beside

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wide(x).unflatten(-1, (-1, 4))
        return self.narrow(self.head(heads).flatten(-2)) + self.beside * self.last(x)


@on_ranks(2)
def test_a_shared_parameter_of_a_part_of_its_input_is_refused(context: Context) -> None:
    """Each rank would hold a term of its gradient, and the norm would be too small."""
    mesh, plan = tensor_mesh(context), {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    batch = zoo.numbers(4, 5, 6, out=(5, 3))
    for how, mode in zip(NORM_REDUCTIONS, MODES, strict=True):
        model = private(parallelize_module(HeadNorm(), mesh, plan), mode, norm_reduction=how)
        with pytest.raises(RuntimeError, match=r"^head.weight: not split over the tensor-parallel"):
            private_loss(model, batch, zoo.product).backward()
    network = parallelize_module(HeadNorm(beside=100.0), mesh, plan)  # of most of the norm
    model, narrow = private(network, MODES[0], norm_reduction="async"), network.narrow.weight
    begin = narrow.to_local().clone()
    with torch.no_grad():
        narrow.to_local().zero_()
    private_loss(model, batch, zoo.product).backward()  # head.weight has no gradient yet
    model.clear_gradients()
    with torch.no_grad():
        narrow.to_local().copy_(begin)
    for _ in range(3):  # also of a loop that goes on
        with pytest.raises(RuntimeError, match=r"^head.weight: not split over the tensor-parallel"):
            private_loss(model, batch, zoo.product).backward()
    network = HeadNorm()
    network.head.requires_grad_(False)
    step(parallelize_module(network, mesh, plan), batch)


@on_ranks(2)
def test_other_samples_are_refused_until_they_are_the_same(context: Context) -> None:
    """Ranks that had other samples compare them again, in a loop that goes on."""
    model = private(split_layers(build_layers(), tensor_mesh(context)), MODES[0])
    ids, targets = ids_and_targets()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="different losses for what should be the same"):
            private_loss(model, (ids, targets * (1 + context.rank)), zoo.product).backward()
    one_step(model, (ids, targets), zoo.product)
