"""Coefficients from bounds; those from norms are a kernel's (kernels/test_coefficients.py)."""

import torch

from dp_clipping.modes import policy_of
from dp_clipping.step.fused.coefficients import FusedCoefficients


def coefficients() -> FusedCoefficients:
    clip_norms = torch.tensor([1.0, 2.0], dtype=torch.float64)
    left_out = torch.zeros(3, dtype=torch.bool)
    return FusedCoefficients(clip_norms, [[], []], policy_of("flash"), left_out)


def test_contributions_are_at_most_the_threshold():
    bounds = torch.tensor([[4.0, 0.25, 1.0], [100.0, 1.0, 4.0]])
    found = coefficients().of_bounds(bounds, [0, 1])
    lengths = found.values * bounds.sqrt()
    assert (lengths[0] <= 1).all()
    assert (lengths[1] <= 2).all()
    assert found.values[0, 1] > 0.99
    assert found.rows == {0: 0, 1: 1}


def test_a_group_of_its_own_has_its_own_threshold():
    found = coefficients().of_bounds(torch.tensor([[16.0, 1.0, 1.0]]), [1])
    torch.testing.assert_close(found.values[0, 0], torch.tensor(0.5), rtol=1e-4, atol=0)
    assert found.rows == {1: 0}


def test_a_sample_is_left_out_from_then_on():
    mine = coefficients()
    mine.of_bounds(torch.tensor([[torch.inf, 1.0, 1.0]]), [0])
    found = mine.of_bounds(torch.ones(1, 3), [1])
    assert found.values[0, 0] == 0
    assert mine.left_out.tolist() == [True, False, False]
