"""A recurrent layer's kernel keeps nothing of its input that its backward does not read."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from dp_clipping.layers.recurrent import kernel

T, N, H = 32, 8, 64


class Saves(torch.autograd.Function):
    """The first input times two, which saves both inputs and lets a list have what it gets back."""

    @staticmethod
    def forward(ctx, x, beside, found):
        ctx.found = found
        ctx.save_for_backward(x, beside)
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        ctx.found += ctx.saved_tensors
        return 2 * g, None, None


@pytest.mark.parametrize("count", [100, 10])
def test_bytes_that_are_saved_beside_it_stand_in(count):
    x = torch.ones(4, 5, requires_grad=True)
    x = x.clone()
    beside, found = torch.zeros(count, dtype=torch.uint8), []
    with kernel.not_saving(x):
        y = Saves.apply(x, beside, found)
    y.sum().backward()
    stand_in, saved = found
    assert stand_in.shape == x.shape
    assert stand_in.dtype == x.dtype
    assert stand_in.data_ptr() != x.data_ptr()
    assert saved.data_ptr() == beside.data_ptr()
    assert (stand_in.data_ptr() == beside.data_ptr()) == (count >= 4 * x.numel())


def backward_of(mode: str, sizes: torch.Tensor | None) -> tuple[list[torch.Tensor], int]:
    """Returns the gradients of X and of the states, and the bytes that wait for backward."""
    torch.manual_seed(0)
    shape = (T, N) if sizes is None else (int(sizes.sum()),)
    width = kernel.GATES[mode] * H
    x = torch.randn(*shape, width, device="cuda", requires_grad=True)
    weight, bias = torch.randn(width, H, device="cuda") / 8, torch.randn(width, device="cuda")
    states = [torch.zeros(1, N, H, device="cuda", requires_grad=True)] * (1 + (mode == "LSTM"))
    before = torch.cuda.memory_allocated()
    y, *last = kernel.run(mode, 1 * x, states, [(weight, bias, None)], sizes)
    waiting = torch.cuda.memory_allocated() - before
    (y.sin().sum() + last[0].sum()).backward()
    return [x.grad, states[0].grad], waiting


@pytest.mark.gpu
@pytest.mark.parametrize("mode", kernel.RUN)
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_input_is_not_kept_on_a_gpu(mode, is_packed):
    sizes = torch.tensor([N] * (T // 2) + [N // 2] * (T // 2)) if is_packed else None
    with patch.object(kernel, "not_saving", lambda _: nullcontext()):
        backward_of(mode, sizes)
        expected, kept = backward_of(mode, sizes)
    found, waiting = backward_of(mode, sizes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    tokens = T * N if sizes is None else int(sizes.sum())
    assert kept - waiting == 4 * tokens * kernel.GATES[mode] * H
    with saved_tensors_hooks(torch.Tensor.cpu, torch.Tensor.cuda):  # a user's own
        found, _ = backward_of(mode, sizes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
