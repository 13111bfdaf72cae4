"""What all steps of one model have in common."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from dp_clipping.capture.capture import Capture
from dp_clipping.modes import policy_of
from dp_clipping.step.context import StepContext, context_of


def make(network: nn.Module, **changes) -> StepContext:
    options = {
        "mode": "ghost", "batch_first": True, "data_parallel_group": None,
        "norm_reduction": "sync", "hide_unprotected": False,
    }  # fmt: skip
    return context_of(Capture(network), policy_of("ghost"), **options | changes)


@pytest.mark.parametrize(
    ("dtype", "exchanged"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_norms_are_exchanged_in_the_widest_dtype(dtype, exchanged):
    network = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2, dtype=dtype))
    context = make(network)
    assert context.reducer.dtype == exchanged
    assert context.network is network
    assert context.sharding is context.sums is None
    context.capture.remove()


def test_nothing_is_replaced():
    context = make(nn.Linear(2, 2))
    with pytest.raises(FrozenInstanceError):
        context.mode = "flash"
    context.capture.remove()


def test_a_network_in_evaluation_is_refused():
    with pytest.raises(ValueError, match="the network is in evaluation"):
        make(nn.Linear(2, 2).eval())
