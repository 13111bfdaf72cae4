"""Coefficients from bounds; those from norms are a kernel's (kernels/test_coefficients.py)."""

import torch
from torch import nn

from dp_clipping.clipping import coefficients as definition
from dp_clipping.clipping.norms import Norm
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


def test_a_registered_function_is_computed_from_the_same_bounds(monkeypatch):
    monkeypatch.setattr(definition, "_REGISTERED", {})
    definition.register_clipping_function("mine", lambda n, c: (0.5 * c / n).clamp(max=1))
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    policy = policy_of("flash", clipping_function="mine")
    clip_norms = torch.tensor([1.0, 2.0], dtype=torch.float64)
    mine = FusedCoefficients(
        clip_norms, [[weight], [bias]], policy, torch.zeros(3, dtype=torch.bool)
    )
    norms = {
        weight: Norm(torch.tensor([4.0, 0.01, torch.inf])),
        bias: Norm(torch.tensor([1.0, 16.0, 1.0]), torch.tensor([0.0, 3.0, 0.0]), sum_error=0.5),
    }
    found = mine.of([0, 1], norms, lambda: torch.zeros(3)).values
    bound = (4.0 + 0.5 * 3.0) ** 2  # of the sum's rounding
    expected = torch.tensor([[0.25, 1, 0], [1, 1 / bound**0.5, 0]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    assert mine.left_out.tolist() == [False, False, True]
