"""Weighted sums of products, against the reference implementation in float64."""

from itertools import product
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from dp_clipping.kernels import weighted_product
from dp_clipping.kernels.sorted_coefficients import SortedCoefficients
from tests.support.kernel_cases import (
    SUM_BOUND,
    Place,
    assert_within,
    lay_out,
    on_kernels,
    poison,
)

FEW = (5, 35, 16, 8)  # of one tile: with three programs, shares of 2, 2 and 1 samples


@on_kernels()
def test_weighted_product(place: Place) -> None:
    """Coefficients in any order; samples whose coefficient is zero are not read."""
    for (batch_size, tokens, d, p), layouts in product([*place.shapes, FEW], place.layouts):
        some = place.coefficients(batch_size)
        cases = [(some, 1), (some, 3), (torch.ones_like(some), 132), (torch.zeros_like(some), 1)]
        for c, programs in cases if batch_size else ():
            y, a = place.normal(batch_size, tokens, d, seed=1), place.normal(batch_size, tokens, p)
            y, a = lay_out(poison(y, c), layouts[0]), lay_out(poison(a, c), layouts[1])
            weights = SortedCoefficients.of(c)
            with patch.multiple(weighted_product, PROGRAMS=programs, LEAST=1):
                found = weighted_product.weighted_product(y, a, weights, place.tile)
            expected = weighted_product.weighted_product_plain(y, a, c)
            assert found.dtype == torch.float32
            magnitude = weighted_product.weighted_product_plain(y.abs(), a.abs(), c)
            assert_within(found, expected, SUM_BOUND[place.dtype] * magnitude.double())


@on_kernels()
def test_weighted_product_of_nothing(place: Place) -> None:
    """The weights of an empty batch are never formed: the kernel is not asked for them."""
    y, a = place.normal(0, 4, 8), place.normal(0, 4, 16)
    found = weighted_product.weighted_product(y, a, None, place.tile)
    assert torch.equal(found, torch.zeros(8, 16, device=place.device))
