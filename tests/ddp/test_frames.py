"""What a step asks of the host: Python frames of a gradient, and of a step beside PyTorch's DDP."""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.conftest import CPU_COPY_ENGINE, HAND_BUILT

A_GRADIENT = 16  # frames in backward
A_STEP = 1.5  # of the frames of `torch_ddp`
LAYERS = 8
ORDINARY = ["torch_ddp", *HAND_BUILT, CPU_COPY_ENGINE, "zero1", "zero2"]


def frames_of(function: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the number of Python functions that are called, and what the first one returns."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return count, result


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def frames_of_steps(context: Context) -> dict[str, tuple[float, int]]:
    """Returns, of each variant, the frames of a backward and of a whole step."""
    found = {}
    for name in (*ORDINARY, "fsdp"):
        model = wrap(name, Blocks(), process_group=context.group)
        optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
        x = torch.ones(2, 3, 16)
        for _ in range(3):  # the last one is counted
            gc.collect()  # an earlier wrapper's end would be counted
            forward, y = frames_of(partial(model, x))
            loss = y.sum()
            backward, _ = frames_of(loss.backward)
            finish, _ = frames_of(model.finish_gradient_synchronization)
            optimizer.step()
            optimizer.zero_grad()
        gradients = sum(1 for _ in model.parameters())
        found[name] = backward / gradients, forward + backward + finish
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_frames_of_a_step(cpu_ranks, world_size):
    for found in cpu_ranks.run(world_size, frames_of_steps):
        _, torch_ddp = found["torch_ddp"]
        for name, (a_gradient, step) in found.items():
            assert a_gradient <= A_GRADIENT, name
            if name in ORDINARY:  # the others gather parameters too
                assert step <= A_STEP * torch_ddp, name
