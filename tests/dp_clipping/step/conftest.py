"""Computes what `.grad` of a small network holds."""

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
    return private(network, "bookkeeping").gradient_buffer
