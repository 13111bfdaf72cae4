"""Norms and sums in plain PyTorch."""

import pytest
import torch

from dp_clipping.step.plain_backend import PlainBackend
from tests.dp_clipping.conftest import clipped_sums, private, private_loss
from tests.support import zoo


@pytest.mark.parametrize(("mode", "twice"), [("ghost", True), ("bookkeeping", False)])
def test_two_pass_modes_keep_nothing(mode, twice):
    model = private(zoo.linear(3, 2), mode)
    loss = private_loss(model, (torch.ones(4, 3), torch.ones(4, 2)), zoo.product)
    backend = model.step_state.pending.backend
    assert isinstance(backend, PlainBackend)
    assert backend.runs_twice == twice
    loss.backward()
    assert not backend.sums.kept
    assert not backend.norms.found


@pytest.mark.parametrize("mode", ["ghost", "bookkeeping", "per_sample"])
def test_a_sample_without_a_finite_norm_is_left_out_and_counted(mode):
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.ones(4, 2)
    model = private(zoo.linear(3, 2), mode)
    expected = clipped_sums(model, (inputs[:3], targets[:3]))
    inputs[3] = torch.inf
    found = clipped_sums(model, (inputs, targets))
    assert model.nonfinite_samples == 1
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total)
