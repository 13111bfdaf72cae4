"""The arithmetic that differs on a GPU: 16-bit products summed by matrix units, fused norms.

The bodies run on the CPU too, so that what is sent to a GPU is known to be a right test.
"""

import importlib.util
import threading

import pytest
import torch
from torch import nn

from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.optimizer import PrivateOptimizer
from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import MODES, criterion_of, private, private_loss
from tests.support import zoo

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
FLASH = ("flash", "flash_bookkeeping")
SHAPES = [(64, 256, 192), (257, 512, 384), (512, 2048, 1024), (2, 4096, 64), (1, 64, 32)]

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compare_with_oracle(case: zoo.Case, device: str, dtype: torch.dtype, mode: str) -> None:
    """Norms and clipped sum of a network of the zoo, beside float64 on the CPU."""
    batch = oracle.move(case.batch(4), dtype=dtype)
    network = case.build().to(dtype)
    gradients = oracle.per_sample_gradients(network, batch, case.per_sample_loss)
    norms = oracle.norms(gradients)
    threshold = norms.median().item()
    expected = oracle.clipped_sum(gradients, threshold)
    model = private(network.to(device), mode, max_grad_norm=threshold)
    try:
        with full_float32(layers=True):
            private_loss(model, oracle.move(batch, device=device), case.per_sample_loss).backward()
    except (ValueError, RuntimeError):
        if case.or_refused:
            return
        raise
    tolerance = TOLERANCES[dtype]
    found = model.per_sample_gradient_norms.double().cpu()
    assert ((found - norms).abs() <= tolerance * norms.clamp_min(1e-3 * norms.max())).all()
    parameters = dict(network.named_parameters())
    error = sum(
        (parameters[name].grad.double().cpu() - value).square().sum()
        for name, value in expected.items()
    )
    total = sum(value.square().sum() for value in expected.values())
    assert error.sqrt() <= tolerance * total.sqrt()


def largest_contribution(
    device: str, dtype: torch.dtype, mode: str, shapes=SHAPES, policy: dict | None = None
) -> float:
    """Returns a sample's largest share, in C: random tokens, and halves that nearly cancel."""
    largest = 0.0
    for tokens, inputs, outputs in shapes:
        for epsilon in (None, 1e-1, 1e-3, 1e-5):
            x, y = torch.randn(1, tokens, inputs), torch.randn(1, tokens, outputs)
            if epsilon is not None and tokens > 1:
                half = tokens // 2
                x[:, half : 2 * half] = x[:, :half]
                noise = 1 + epsilon * torch.randn(1, half, outputs)
                y[:, half : 2 * half] = -y[:, :half] * noise
                x, y = x[:, : 2 * half], y[:, : 2 * half]
            layer = nn.Linear(inputs, outputs, bias=False).to(device, dtype)
            model = private(layer, mode, max_grad_norm=0.1, policy=policy)
            private_loss(model, (x.to(device, dtype), y.to(device)), zoo.product).backward()
            largest = max(largest, layer.weight.grad.double().norm().item() / 0.1)
    return largest


@pytest.mark.parametrize("mode", MODES)
def test_bodies_on_cpu(mode):
    compare_with_oracle(zoo.BY_NAME["transformer"], "cpu", torch.bfloat16, mode)
    assert largest_contribution("cpu", torch.bfloat16, mode, SHAPES[:1]) <= 1 + 1e-6


@gpu
@needs_gpu
@pytest.mark.parametrize("mode", [*MODES, *FLASH])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_zoo(dtype, mode):
    wrong = []
    for case in zoo.CASES:
        if all(importlib.util.find_spec(package) for package in case.needs):
            try:
                compare_with_oracle(case, "cuda", dtype, mode)
            except (AssertionError, RuntimeError, ValueError) as error:
                wrong.append(f"{case.name}: {error}")
    assert not wrong


@gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["bookkeeping", *FLASH])
def test_backward_stays_in_its_thread(mode):
    """Autograd's own thread of the device would take the interpreter for each layer."""
    threads = set()

    class Noting(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:  # not where samples are looked for
                y.register_hook(lambda _: threads.add(threading.get_ident()))
            return y

    network = nn.Sequential(nn.Linear(8, 8), Noting(8, 8).requires_grad_(False), nn.Linear(8, 4))
    model = private(network.to("cuda"), mode)
    x = torch.randn(3, 8, device="cuda")
    private_loss(model, (x, torch.zeros(3, 4, device="cuda")), zoo.product).backward()
    assert threads == {threading.get_ident()}
    assert torch.autograd.is_multithreading_enabled()


@gpu
@needs_gpu
@pytest.mark.parametrize("mode", FLASH)
def test_a_step_does_not_wait_for_the_device(mode):
    case = zoo.BY_NAME["transformer"]
    network = case.build().to("cuda", torch.bfloat16)
    batch = oracle.move(case.batch(4), device="cuda")
    model = private(network, mode)
    criterion = criterion_of(model, case.per_sample_loss)
    optimizer = PrivateOptimizer(
        torch.optim.AdamW(network.parameters(), fused=True), model=model, noise_multiplier=1.0,
        expected_batch_size=4, noise_key=bytes(32),
    )  # fmt: skip
    try:
        for step in range(3):
            if step == 2:  # the ones before look for layouts and mixing, and compile kernels
                torch.cuda.set_sync_debug_mode("error")
            criterion(oracle.forward(model, batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@needs_gpu
@pytest.mark.parametrize("mode", [*MODES, *FLASH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_sample_adds_at_most_c(dtype, mode):
    assert largest_contribution("cuda", dtype, mode) <= 1 + 1e-6


class TwoStreams(nn.Module):
    """Its second layer runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = self.second(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return y


@gpu
@needs_gpu
def test_layers_on_two_streams_are_refused():
    """A launch reads what layers of both have left."""
    network = TwoStreams().cuda().train()
    model = private(network, "flash_bookkeeping", max_grad_norm=1.0)
    batch = torch.randn(3, 4, device="cuda"), torch.tensor([0, 1, 0], device="cuda")
    with pytest.raises(RuntimeError, match="on several CUDA streams"):
        private_loss(model, batch, zoo.cross_entropy).backward()
