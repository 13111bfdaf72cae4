"""The kernel that forms per-sample gradients, against its reference implementation in float64."""

from itertools import product

import torch

from dp_clipping.kernels import gradient
from tests.support.kernel_cases import (
    HALF_STEP,
    STORED_BOUND,
    SUM_BOUND,
    Place,
    assert_squares,
    assert_within,
    lay_out,
    on_kernels,
)


@on_kernels()
def test_gradient(place: Place) -> None:
    """Values are rounded once; norms are of the rounded values, or with nothing stored of exact."""
    for (batch_size, tokens, d, p), layouts in product(place.shapes, place.layouts):
        # large enough for gradients beyond float16's largest number
        y = lay_out(place.normal(batch_size, tokens, d, seed=1, scale=100), layouts[0])
        a = lay_out(place.normal(batch_size, tokens, p, seed=2, scale=100), layouts[1])
        found, squares = gradient.gradient_and_squares(y, a, place.tile)
        expected, _ = gradient.gradient_and_squares_plain(y, a)
        assert found.dtype == expected.dtype == gradient.stored_dtype(place.dtype)
        magnitude = torch.bmm(y.double().abs().mT, a.double().abs())
        bound = SUM_BOUND[place.dtype] * magnitude
        bound += 2 * HALF_STEP[found.dtype] * expected.double().abs()
        assert_within(found, expected, bound)
        assert_squares(squares, found.double().square().sum((1, 2)), STORED_BOUND)
        nothing, squares = gradient.gradient_and_squares(y, a, place.tile, store=False)
        assert nothing is None
        exact = torch.bmm(y.double().mT, a.double()).square().sum((1, 2))
        assert_squares(squares, exact)
        assert_squares(gradient.gradient_and_squares_plain(y, a, store=False)[1], exact)
