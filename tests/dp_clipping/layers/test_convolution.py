"""Convolutions: any padding and size as PyTorch has it, and no sample beyond C on the kernels."""

import pytest
import torch
from torch import nn

from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import private, private_loss
from tests.dp_clipping.step.test_on_gpu import compare_with_oracle
from tests.support import zoo


class Called(nn.Module):
    """A convolution, and how it is called."""

    def __init__(self, layer: nn.Module, **arguments):
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x):
        return self.layer(x, **self.arguments)


LAYERS = {
    "valid": (lambda: Called(nn.Conv2d(3, 4, (2, 3), padding="valid")), (3, 6, 5)),
    "same, uneven": (lambda: Called(nn.Conv2d(3, 4, (2, 4), padding="same")), (3, 6, 5)),
    "replicate": (lambda: Called(nn.Conv1d(3, 4, 3, padding=2, padding_mode="replicate")), (3, 6)),
    "circular, same": (
        lambda: Called(nn.Conv3d(2, 4, (2, 1, 3), padding="same", padding_mode="circular")),
        (2, 3, 4, 5),
    ),
    "output size": (
        lambda: Called(nn.ConvTranspose2d(3, 4, 3, stride=3), output_size=(13, 14)),
        (3, 4, 4),
    ),
    "one pixel": (lambda: Called(nn.Conv2d(3, 4, 3, padding=1)), (3, 1, 1)),
    "channels last": (
        lambda: Called(nn.Conv2d(3, 4, 3, groups=1)).to(memory_format=torch.channels_last),
        (3, 5, 5),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_pytorchs(name):
    build, shape = LAYERS[name]
    network = build().double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    if name == "channels last":
        x = x.to(memory_format=torch.channels_last)
    expected = network(x)
    model = private(network, "bookkeeping", max_grad_norm=1e9)
    outputs = model(x)
    assert torch.equal(outputs, expected)
    y = torch.randn_like(expected)
    private_loss(model, (x, y), zoo.product).backward()
    norms = oracle.norms(oracle.per_sample_gradients(build_like(network), (x, y), zoo.product))
    torch.testing.assert_close(model.per_sample_gradient_norms, norms)


def build_like(network: nn.Module) -> nn.Module:
    """The same without a private model around it."""
    layer = network.layer
    for attribute in ("forward", "_private"):
        vars(layer).pop(attribute, None)
    return network


def test_a_picture_without_a_batch_is_refused_by_shape():
    model = private(Called(nn.Conv2d(3, 4, 3)))
    with pytest.raises((ValueError, RuntimeError)):
        model(torch.randn(3, 6, 6))


class Standardised(nn.Conv2d):
    """Another convolution behind PyTorch's `forward`."""

    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return super()._conv_forward(x, weight, bias)


class Named(nn.Conv2d):
    def __init__(self, channels: int):
        super().__init__(channels, channels, 3)


def test_a_subclass_with_arithmetic_of_its_own_keeps_it():
    network, x = Called(Standardised(3, 4, 3)).double(), torch.randn(3, 3, 5, 5).double()
    expected = network(x)
    model = private(network, "bookkeeping", max_grad_norm=1e9)
    torch.testing.assert_close(model(x), expected)
    assert [handle.kind for handle in model.capture.handles] == ["vectorized"]
    assert [handle.kind for handle in private(Named(2)).capture.handles] == ["convolution"]


def largest_contribution(dtype: torch.dtype) -> float:
    """Of one sample, in units of C: random pixels, and a half that nearly undoes the other."""
    largest = 0.0
    for size, epsilon in ((6, None), (6, 1e-3), (2, 1e-5), (8, 1e-5)):
        x, y = torch.randn(1, 16, 2, size), torch.randn(1, 20, 2, size)
        if epsilon is not None:
            x[:, :, 1] = x[:, :, 0]
            y[:, :, 1] = -y[:, :, 0] * (1 + epsilon * torch.randn(1, 20, size))
        layer = nn.Conv2d(16, 20, (1, 3), padding=(0, 1), bias=False).to(dtype)
        model = private(layer, "flash_bookkeeping", max_grad_norm=0.1)
        private_loss(model, (x.to(dtype), y.to(dtype)), zoo.product).backward()
        largest = max(largest, layer.weight.grad.double().norm().item() / 0.1)
    return largest


def check_contributions() -> None:
    for dtype in (torch.float32, torch.float16):
        found = largest_contribution(dtype)
        assert 0.9 < found <= 1 + 1e-6, (dtype, found)


def check_networks() -> None:
    for name in ("wide", "frames", "conv2d_depthwise"):
        for mode in ("flash", "flash_bookkeeping"):
            compare_with_oracle(zoo.BY_NAME[name], "cpu", torch.float32, mode)


@pytest.mark.parametrize("body", [check_contributions, check_networks])
def test_on_kernels_in_the_interpreter(interpreter, body):
    interpreter.run(body)
