"""What `.grad` holds from one zero_grad to the next."""

import torch

from dp_clipping.step.gradient_buffer import GradientBuffer


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
