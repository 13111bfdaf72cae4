"""Weighted sums of products, against the reference implementation in float64."""

from itertools import product

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


@on_kernels()
def test_weighted_product(place: Place) -> None:
    """Coefficients in any order; samples whose coefficient is zero are not read."""
    for (batch_size, tokens, d, p), layouts in product(place.shapes, place.layouts):
        some = place.coefficients(batch_size)
        for c in (some, torch.ones_like(some), torch.zeros_like(some)) if batch_size else ():
            y, a = place.normal(batch_size, tokens, d, seed=1), place.normal(batch_size, tokens, p)
            y, a = lay_out(poison(y, c), layouts[0]), lay_out(poison(a, c), layouts[1])
            found = weighted_product.weighted_product(y, a, SortedCoefficients.of(c), place.tile)
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
