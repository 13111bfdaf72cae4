"""Products of float32 on kernels, where PyTorch may multiply them in TensorFloat-32."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.pytorch_utils import Conv1D

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.parallel import TENSOR
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.kernels.convolution import factors
from dp_clipping.kernels.convolution.layout import ConvolutionFactors
from dp_clipping.step.sums import clipped_sums as of_sums
from dp_clipping.step.sums import layer_plans
from tests.dp_clipping.conftest import clipped_sums, private
from tests.dp_clipping.ops.records import cancelling
from tests.support import zoo
from tests.support.kernel_cases import on_gpu
from tests.support.sharded_steps import one_step

SAMPLES, TOKENS, INPUTS, OUTPUTS = 5, 12, 24, 20
BATCH_FIRST = {"linear": True, "transposed": True, "lstm": True, "lstm_time_first": False}
MODES = ("flash_bookkeeping", "flash")


class Tokens(nn.Module):
    """Takes [samples, tokens, inputs] and returns the layer's outputs likewise."""

    def __init__(self, layer: nn.Module, batch_first: bool = True):
        super().__init__()
        self.layer, self.batch_first = layer, batch_first

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x if self.batch_first else x.transpose(0, 1))
        y = y[0] if isinstance(y, tuple) else y
        return y if self.batch_first else y.transpose(0, 1)


def build(name: str) -> nn.Module:
    if name == "linear":
        return Tokens(nn.Linear(INPUTS, OUTPUTS))
    if name == "transposed":
        return Tokens(Conv1D(OUTPUTS, INPUTS))
    batch_first = BATCH_FIRST[name]
    return Tokens(nn.LSTM(INPUTS, OUTPUTS, batch_first=batch_first), batch_first)


@contextmanager
def rounding(precision: str = "high", least: int = 0) -> Iterator[None]:
    """Allows TensorFloat-32, by default for all layers and for products of any size."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)  # recurrent layers may use it in any case
    try:
        with patch.object(layer_plans, "LEAST_ROUNDED", least):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def watched() -> Iterator[set[torch.Size]]:
    """Yields a set to which the shapes of weights are added whose operands are packed."""
    packed, pack = set(), factors.pack_whole

    def pack_and_note(uses: list[ConvolutionFactors]) -> None:
        packed.update(use.shape for use in uses)
        pack(uses)

    with (
        patch.object(factors, "pack_whole", pack_and_note),
        patch.object(of_sums, "pack_whole", pack_and_note),
    ):
        yield packed


def batch_on(device: str) -> oracle.Batch:
    x, y = torch.randn(SAMPLES, TOKENS, INPUTS), torch.randn(SAMPLES, TOKENS, OUTPUTS)
    return x.to(device), y.to(device)


def check_sums(name: str, mode: str, device: str) -> None:
    """Sums are those of float32 but for rounding; where nothing may be rounded nothing is."""
    model = private(zoo.seeded(lambda: build(name)).to(device), mode)
    model.skip_checks()
    batch = batch_on(device)
    with rounding(), watched() as packed:
        with full_float32(layers=True):
            exact = clipped_sums(model, batch)
        assert not packed
        found = clipped_sums(model, batch)
    assert packed == {p.shape for p in model.network.parameters() if p.dim() == 2}
    with rounding("highest"), watched() as packed:
        clipped_sums(model, batch)
    assert bool(packed) == name.startswith("lstm")
    for one, total in exact.items():
        assert (found[one] - total).abs().max() <= 4e-3 * total.abs().max()


def check_bound(name: str, mode: str, device: str) -> None:
    """A sample adds at most C in the arithmetic that is used, also where its tokens cancel."""
    x, y = (t.to(device) for t in cancelling(batch_on("cpu"), 1, torch.float32))

    def norm(i: int, max_grad_norm: float) -> float:
        model = private(zoo.seeded(lambda: build(name)).to(device), mode, max_grad_norm)
        model.skip_checks()
        sums = clipped_sums(model, (x[i : i + 1], y[i : i + 1]))
        return sum(g.double().square().sum() for g in sums.values()).sqrt().item()

    with rounding():
        for i in range(SAMPLES):
            limit = max(0.3 * norm(i, 1e9), 1e-6)
            found = norm(i, limit)
            assert found <= limit * (1 + 1e-6)
            assert i > 0 or found >= limit * (1 - 1e-4)  # its tokens do not cancel


def check_size() -> None:
    """Large products of a sample are rounded, however many samples; a given algorithm is kept."""
    least = TOKENS * INPUTS * OUTPUTS
    for size, algorithm, is_large in (
        (least, "auto", True), (least + 1, "auto", False), (least, "input_length", False),
    ):  # fmt: skip
        for samples in (1, SAMPLES):
            policy = {"norm_algorithm": algorithm}
            model = private(build("linear"), "flash_bookkeeping", policy=policy)
            model.skip_checks()
            x, y = batch_on("cpu")
            with rounding(least=size), watched() as packed:
                clipped_sums(model, (x[:samples], y[:samples]))
            assert bool(packed) == is_large


def test_small_products_are_not_rounded(interpreter):
    interpreter.run(check_size)


def check_tensor_parallel(context: Context) -> None:
    """A weight that both ranks have whole is not rounded: memory might let one of them alone."""
    network = nn.Sequential(nn.Linear(INPUTS, 16), nn.Linear(16, 8), nn.Linear(8, OUTPUTS))
    mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=(TENSOR,))
    plan = {"1": ColwiseParallel(), "2": RowwiseParallel()}
    model = private(parallelize_module(zoo.seeded(lambda: network), mesh, plan), MODES[0])
    model.skip_checks()
    torch.manual_seed(0)
    with rounding(), watched() as packed:
        one_step(model, batch_on("cpu"), zoo.product)
    assert packed == {torch.Size([4, 16]), torch.Size([OUTPUTS, 4])}


def test_weights_of_several_ranks(interpreter):
    interpreter.ranks.run(2, check_tensor_parallel)


every_case = pytest.mark.parametrize(
    ("name", "mode"), [(name, MODES[n % 2]) for n, name in enumerate(BATCH_FIRST)]
)


@every_case
@pytest.mark.parametrize("check", [check_sums, check_bound])
def test_rounded_products(interpreter, check, name, mode):
    interpreter.run(check, name, mode, "cpu")


@on_gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BATCH_FIRST)
@pytest.mark.parametrize("check", [check_sums, check_bound])
def test_rounded_products_on_gpu(check, name, mode):
    check(name, mode, "cuda")
