"""What `.grad` holds from one zero_grad to the next."""

import pytest
import torch
from torch import nn

from dp_clipping.step.gradient_buffer import GradientBuffer
from tests.dp_clipping.conftest import private


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(2, 1))


@pytest.fixture
def buffer(network) -> GradientBuffer:
    return private(network, "bookkeeping")._gradients


def begin(buffer: GradientBuffer) -> None:
    buffer.begin_backward()
    if not buffer.state.is_open:
        buffer.state.open([1.0])


def clear(buffer: GradientBuffer) -> None:
    buffer.clear()
    buffer.state.drop()


def fill(buffer: GradientBuffer, value: float = 1.0) -> None:
    begin(buffer)
    for parameter in buffer.capture.parameters:
        buffer.accumulate(parameter, torch.full(parameter.shape, value))
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
    buffer.apply(weight, noisy)
    assert weight.grad is noisy
    clear(buffer)
    fill(buffer)
    assert weight.grad.dtype == torch.float32


def test_zeros_are_sums_too(buffer, network):
    begin(buffer)
    for parameter in buffer.capture.parameters:
        buffer.accumulate(parameter, None)
    buffer.end_backward()
    assert all((p.grad == 0).all() for p in network.parameters())


def test_a_sum_that_was_changed_is_refused(buffer, network):
    fill(buffer)
    buffer.refuse_unclipped()
    network[1].weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match=r"the gradient of 1\.weight was changed between"):
        buffer.refuse_unclipped()


def test_an_ordinary_gradient_is_refused(buffer, network):
    fill(buffer)
    network[1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has added to the gradient of 1\.bias, 1\.weight"):
        buffer.refuse_unclipped()
    clear(buffer)
    fill(buffer)
    buffer.refuse_unclipped()


def test_gradients_of_the_last_step_are_refused(buffer):
    fill(buffer)
    buffer.settle()
    buffer.state.add_noise()
    buffer.state.apply()
    with pytest.raises(ValueError, match="gradients of the last step are still there"):
        begin(buffer)


def test_parameters_that_were_frozen_or_replaced_are_refused(buffer, network):
    network[1].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"1\.bias \(frozen now\)"):
        begin(buffer)
    network[1].bias.requires_grad_(True)
    network[1].bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"1\.bias of the network is another tensor"):
        begin(buffer)
