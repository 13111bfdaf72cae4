"""Coefficients: what each function gives, its margin, and which thresholds are taken."""

import pytest
import torch

from dp_clipping.clipping.coefficients import (
    HIGHEST,
    LOWEST,
    MARGIN,
    check_range,
    clip_norms_of,
    coefficients,
    finite_samples,
)


def of(norms: list[float], limit: float, function: str, gamma: float = 0.01) -> torch.Tensor:
    squares = torch.tensor([norms], dtype=torch.float64).square()
    return coefficients(squares, torch.tensor([limit]), function, gamma)[0]


def test_abadi_leaves_small_norms_and_scales_large_ones():
    found = of([0.0, 0.5, 2.0, 8.0], 2.0 * (1 + MARGIN[torch.float64]), "abadi")
    torch.testing.assert_close(found, torch.tensor([1, 1, 1, 0.25], dtype=torch.float64))


def test_automatic_normalises_every_norm():
    found = of([0.0, 1.0, 3.0], 2.0, "automatic", 0.5)
    expected = torch.tensor([4.0, 2 / 1.5, 2 / 3.5], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", MARGIN, ids=str)
@pytest.mark.parametrize("function", ["abadi", "automatic"])
def test_a_contribution_is_below_the_threshold_by_the_margin(dtype, function):
    norms = torch.logspace(-3, 3, 61, dtype=dtype)[None]
    found = coefficients(norms.square(), torch.tensor([0.7]), function, LOWEST)
    contributions, limit = found.double() * norms.double(), 0.7 / (1 + MARGIN[dtype])
    assert (contributions <= limit * (1 + 1e-6)).logical_or(found == 1).all()
    assert (contributions[norms > 1] >= limit * (1 - 1e-6)).all()


@pytest.mark.parametrize("function", ["abadi", "automatic"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_sample_with_one_bad_group_contributes_nothing_in_any(function, bad):
    squares = torch.tensor([[1.0, 1.0], [1.0, bad]])
    assert finite_samples(squares).tolist() == [True, False]
    found = coefficients(squares, torch.tensor([0.5, 2.0]), function)
    assert (found[:, 1] == 0).all()
    assert (found[:, 0] > 0).all()


def test_each_group_has_its_own_threshold():
    squares = torch.full((2, 1), 16.0, dtype=torch.float64)
    found = coefficients(squares, torch.tensor([1.0, 2.0]), "abadi")
    torch.testing.assert_close(found[:, 0] * 4, torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_thresholds_of_groups_have_the_sensitivity_of_one():
    assert clip_norms_of(2.0, 4, "flat") == [2.0]
    split = clip_norms_of(2.0, 4, "per_layer")
    assert split == [1.0] * 4
    assert sum(c * c for c in split) == 2.0**2
    assert clip_norms_of([1, 3], 2, "per_layer") == [1.0, 3.0]


@pytest.mark.parametrize("value", [0.0, LOWEST / 2, HIGHEST * 2, float("inf"), float("nan"), -1.0])
def test_thresholds_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match="max_grad_norm is"):
        clip_norms_of(value, 1, "flat")
    with pytest.raises(ValueError, match="a clipping group"):
        clip_norms_of([1.0, value], 2, "per_layer")
    with pytest.raises(ValueError, match="gamma is"):
        check_range("gamma", value)


def test_the_ends_of_the_range_are_taken():
    assert clip_norms_of([LOWEST, HIGHEST], 2, "per_layer") == [LOWEST, HIGHEST]
