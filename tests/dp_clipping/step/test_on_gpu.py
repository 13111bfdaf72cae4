"""What a step does on a GPU besides arithmetic: its thread, and no wait for the device."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.optimizer import PrivateOptimizer
from tests.dp_clipping.conftest import criterion_of, private, private_loss
from tests.support import zoo

FLASH = ("flash", "flash_bookkeeping")


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("mode", FLASH)
def test_a_step_does_not_wait_for_the_device(mode):
    case = zoo.BY_NAME["transformer"]
    network = case.build().to("cuda", torch.bfloat16)
    batch = oracle.move(case.batch(4), device="cuda")
    model = private(network, mode)
    criterion = criterion_of(model, case.per_sample_loss)
    settings = SimpleNamespace(
        optimizer=torch.optim.AdamW(network.parameters(), fused=True), noise_multiplier=1.0,
        expected_batch_size=4, loss_reduction="mean", adaptive_threshold=None, cuda_graph=False,
        fused_step=False,
    )  # fmt: skip
    optimizer = PrivateOptimizer(settings, model=model, noise_key=bytes(32), count=lambda _: None)
    try:
        for step in range(3):
            if step == 2:  # the ones before look for layouts and mixing, and compile kernels
                torch.cuda.set_sync_debug_mode("error")
            criterion(oracle.forward(model, batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


@pytest.mark.gpu
def test_layers_on_two_streams_are_refused():
    """A launch reads what layers of both have left."""
    network = TwoStreams().cuda().train()
    model = private(network, "flash_bookkeeping", max_grad_norm=1.0)
    batch = torch.randn(3, 4, device="cuda"), torch.tensor([0, 1, 0], device="cuda")
    with pytest.raises(RuntimeError, match="on several CUDA streams"):
        private_loss(model, batch, zoo.cross_entropy).backward()
