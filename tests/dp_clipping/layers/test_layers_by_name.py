"""Layers whose weights are read elsewhere, and what surrounds a private model."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.dp_clipping.conftest import assert_step, private

SAMPLES = 6
ROUNDING = 4e-5  # of float32, and the margin that coefficients keep for it


def rows(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape)


def ids() -> Tensor:
    return torch.randint(0, 9, (SAMPLES, 7))


class Late(nn.Module):
    """Reads a layer's weight, and calls the layer only once `calls` is set."""

    def __init__(self, bias: bool):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 4, bias)
        self.calls = False

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(self.embedding(x), self.head.weight)
        return (self.head(y) if self.calls else y).mean(1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["per_sample", "ghost", "flash_bookkeeping"])
def test_a_layer_whose_weight_is_read_before_it_is_first_called(mode, bias):
    """The step that finds it out begins anew: nothing of what was prepared for it stays."""
    torch.manual_seed(0)
    network, batch = Late(bias), (ids(), torch.randn(SAMPLES, 4))
    model = private(copy.deepcopy(network), mode)
    for calls in (False, True):
        network.calls = model.network.calls = calls
        assert_step(model, network, batch, tolerance=ROUNDING)


class Several(nn.Module):
    """One output, or two."""

    def __init__(self):
        super().__init__()
        self.scale, self.count = nn.Parameter(torch.ones(4)), 1

    def forward(self, x):
        return (torch.maximum(x, self.scale),) * self.count


def test_another_number_of_outputs_is_named():
    model = private(nn.Sequential(Several()))
    for _ in range(2):  # in these the samples are looked for
        model(torch.randn(3, 4))
    model.network[0].count = 2
    with pytest.raises(ValueError, match=r"0 \(Several\) returns 2 tensors, and 1 when"):
        model(torch.randn(3, 4))


@pytest.fixture
def model():
    return private(nn.Sequential(nn.Linear(4, 3)))


@pytest.mark.parametrize("how", ["torch.compile", "compile"])
def test_a_private_model_is_not_compiled(model, how):
    called = model
    if how == "compile":
        model.compile(backend="eager")
    else:
        called = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match=r"before make_private, as network.compile\(\)"):
        called(rows(4))
    torch.compiler.reset()
