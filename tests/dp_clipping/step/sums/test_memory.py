"""Peak memory of a private step beside an ordinary one's: live bytes of tensors, on the host."""

import gc
import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_clipping.kernels.convolution import factors, packing
from dp_clipping.planning.cost_model import INSTANTIATE
from dp_clipping.step.sums import layer_plans, work
from tests.dp_clipping.conftest import clipped_sums, unchecked
from tests.support import zoo

CHANNELS, PIXELS, TOKENS, WIDTH, LAYERS, SAMPLES = 16, 3072, 4, 128, 8, 4
TIMES = 24  # that a layer's output is saved by what follows it


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators have seen and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known[storage._cdata] = storage.nbytes()
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, storage._cdata)
        if self.bytes > self.peak:
            gc.collect()  # Triton's interpreter leaves operands in cycles
            self.peak = max(self.peak, self.bytes)

    def _forget(self, number: int) -> None:
        self.bytes -= self.known.pop(number)


def peak_of(step: Callable[[], object]) -> int:
    """Bytes at the peak of a step, with those that the package asks the allocator for."""
    step()  # places of samples, tables
    gc.freeze()  # so that a collection looks at objects of this step alone
    with Live() as live:
        now = lambda device: live.bytes  # noqa: E731
        with (
            patch.object(layer_plans, "allocated", now),
            patch.object(work, "allocated", now),
            patch.object(packing, "PACKED_BYTES", 1 << 18),
            patch.object(factors, "LEAST_PROGRAMS", 1),
            patch.object(work, "PENDING_BYTES", 0),
            patch.object(work.Work, "_has_room", lambda own: False),
        ):
            step()
    gc.unfreeze()
    return live.peak


class Wave(nn.Module):
    """Convolutions over many positions, and linear layers on few: [B, 1, PIXELS]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, CHANNELS, 3, padding=1)
        self.second = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)
        self.first.requires_grad_(False)
        self.pool = nn.AdaptiveAvgPool1d(TOKENS)
        self.enter = nn.Linear(CHANNELS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.second(self.first(x).relu()))
        x = self.enter(x.mT)
        for layer in self.layers:
            x = layer(x)
            for _ in range(TIMES):
                x = x.sin()
        return x


def check_peak() -> None:
    """Some G are kept, but no more than what is free when backward is in the convolution."""
    network, batch = zoo.seeded(Wave), (torch.randn(SAMPLES, 1, PIXELS), 0.0)
    ordinary = peak_of(lambda: (network.zero_grad(), network(batch[0]).sum().backward()))
    network.zero_grad()
    model = unchecked(network, "flash_bookkeeping")
    plans, loss = model.step_context.plans, lambda outputs, _: outputs.flatten(1).sum(1)
    private = peak_of(lambda: (plans.forget(), clipped_sums(model, batch, loss)))
    kept = [choice.algorithm for choice in plans.last.choices].count(INSTANTIATE)
    assert 0 < kept < LAYERS
    assert private <= 1.05 * ordinary


@pytest.mark.slow
def test_kept_gradients_leave_room_for_a_convolution_before_them(interpreter):
    interpreter.run(check_peak)
