"""What `.grad` holds from one zero_grad to the next."""

import pytest
import torch
from torch import nn

from dp_clipping.step.gradient_buffer import GradientBuffer
from dp_clipping.step.state import StepState


def begin(buffer: GradientBuffer) -> None:
    buffer.begin_backward()
    if not buffer.state.is_open:
        buffer.state.open([1.0])


def clear(buffer: GradientBuffer) -> None:
    buffer.clear()
    buffer.state.drop()


def fill(buffer: GradientBuffer, value: float = 1.0) -> None:
    begin(buffer)
    buffer.accumulate([(one, torch.full(one.shape, value)) for one in buffer.capture.trained])
    buffer.end_backward()


def test_sums_add_up_in_float32(buffer, network):
    fill(buffer)
    fill(buffer, 2.0**-12)  # lost beside 1 in bfloat16
    for parameter in network.parameters():
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad == 1 + 2.0**-12).all()


def test_what_is_applied_has_the_parameters_own_dtype(buffer, network):
    fill(buffer)
    weight = network[0].weight
    noisy = weight.grad.to(torch.bfloat16)
    buffer.apply([(weight, noisy)])
    assert weight.grad is noisy
    clear(buffer)
    fill(buffer)
    assert weight.grad.dtype == torch.float32


def test_zeros_are_sums_too(buffer, network):
    begin(buffer)
    buffer.accumulate([(one, None) for one in buffer.capture.trained])
    buffer.end_backward()
    assert all((p.grad == 0).all() for p in network.parameters())


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
