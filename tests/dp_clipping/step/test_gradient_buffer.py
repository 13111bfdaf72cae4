"""What `.grad` holds from one zero_grad to the next."""

import pytest
import torch
from torch import nn

from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.state import StepState
from tests.dp_clipping.conftest import private


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(2, 1))


@pytest.fixture
def buffer(network) -> GradientBuffer:
    return private(network, "bookkeeping").gradient_buffer


def clear(buffer: GradientBuffer) -> None:
    buffer.clear()
    buffer.state.drop()


def fill(buffer: GradientBuffer, value: float = 1.0) -> None:
    buffer.begin_backward()
    buffer.state.open([1.0])
    buffer.accumulate([(one, torch.full(one.shape, value)) for one in buffer.capture.trained])
    buffer.end_backward()


def test_what_is_applied_has_the_parameters_own_dtype(buffer, network):
    fill(buffer)
    weight = network[0].weight
    assert weight.grad.dtype == torch.float32
    noisy = weight.grad.to(torch.bfloat16)
    buffer.apply([(weight, noisy)])
    assert weight.grad is noisy
    clear(buffer)
    fill(buffer)
    assert weight.grad.dtype == torch.float32


class Wrapper(nn.Module):
    """Notes what a data-parallel wrapper is given to send."""

    reduce, gradient_dtype, gradients_come_by_hand = "mean", None, False

    def __init__(self):
        super().__init__()
        self.sent, self.finished = [], 0

    def before_gradient(self, parameter):
        pass

    def gradient_ready(self, parameter):
        self.sent.append(parameter)

    def finish_gradient_synchronization(self):
        self.finished += 1


def test_sums_are_sent_once_and_those_held_back_at_the_end(buffer, network):
    context, backwards = buffer.context, list(reversed(list(network.parameters())))
    buffer.remove()
    wrapper = Wrapper()
    buffer = GradientBuffer(context, StepState(), wrapper)
    assert (wrapper.reduce, wrapper.gradients_come_by_hand) == ("sum", True)
    fill(buffer)
    count = len(wrapper.sent)
    buffer.finish()
    assert (len(wrapper.sent), wrapper.finished) == (count, 1)
    clear(buffer)
    wrapper.require_backward_grad_sync = False
    fill(buffer)
    wrapper.sent.clear()
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) under no_sync\(\)"):
        buffer.finish()
    wrapper.require_backward_grad_sync = True
    buffer.finish()
    assert all(map(lambda one, other: one is other, wrapper.sent, backwards))
    assert (len(wrapper.sent), wrapper.finished) == (len(backwards), 2)
    buffer.remove()
    assert (wrapper.reduce, wrapper.gradients_come_by_hand) == ("mean", False)
