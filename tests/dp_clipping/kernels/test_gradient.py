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


@on_kernels()
def test_squares_of_tiles(place: Place) -> None:
    """Adds up whole batches and pieces, with groups and scales; what no tile has written is not
    read, and squares that 32 bits do not hold together with their scale are no zeros."""
    torch.manual_seed(0)
    device, size = place.device, 5
    parts = torch.rand(3, size, gradient.SQUARES + 9, device=device)
    parts[1, :, 7:] = torch.nan
    of_groups = torch.rand(1, size * 3, 4, device=device)
    of_groups[..., 2:] = torch.nan
    scale = torch.tensor([1.0, 1e-30, 2.0, 0.0, 1e30], device=device)
    tiny = torch.full((1, size, 1), 1e30, device=device)
    pieces = torch.rand(1, 3, 4, device=device), torch.rand(1, 2, 6, device=device)
    pieces[0][0, 2] = torch.inf
    tiles = [
        [(parts, 0, gradient.SQUARES + 9)],
        [(parts, 1, 7)],
        [(of_groups, 0, 2)],
        [(tiny, 0, 1)],
        [(pieces[0], 0, 4), (pieces[1], 0, 6)],
    ]
    groups, scales = [1, 1, 3, 1, 1], [None, None, scale, scale, scale]
    each = zip(tiles, groups, scales, strict=True)
    expected = torch.stack([gradient.squares_of_tiles_plain(*one) for one in each])
    found = gradient.squares_of_tiles(tiles, groups, scales, size)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert (found[:3, 0] > 0).all()
    assert 0 < found[3, 1] < 1e-29
    nothing = [[(parts[:, :0], n, 1)] for n in (0, 1)]
    assert gradient.squares_of_tiles(nothing, [1, 1], [None, None], 0).shape == (2, 0)
