"""Weighted sums of products, against the reference implementation in float64."""

from itertools import product
from unittest.mock import patch

import torch

from dp_clipping.kernels import weighted_product
from dp_clipping.kernels.coefficients import SortedCoefficients
from tests.support.kernel_cases import SUM_BOUND, Place, assert_within, lay_out, on_kernels, poison

FEW = (5, 35, 16, 8)  # in three shares of 2, 2 and 1 samples


@on_kernels()
def test_weighted_product(place: Place) -> None:
    """Coefficients in any order; samples whose coefficient is zero are not read."""
    for (batch_size, tokens, d, p), layouts in product([*place.shapes, FEW], place.layouts):
        some = place.coefficients(batch_size)
        share = 2 if batch_size == FEW[0] else max(1, batch_size)
        for c in (some, torch.ones_like(some), torch.zeros_like(some)) if batch_size else ():
            y, a = place.normal(batch_size, tokens, d, seed=1), place.normal(batch_size, tokens, p)
            y, a = lay_out(poison(y, c), layouts[0]), lay_out(poison(a, c), layouts[1])
            weights = SortedCoefficients.of(c)
            with patch.object(weighted_product, "_share", return_value=share):
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


def test_shares() -> None:
    """Samples are divided where tiles leave processors idle, and into few shares."""
    share = weighted_product._share
    assert share([18], [4], 128) == 19  # seven shares: 126 programs
    assert share([72], [4], 128) == 26  # five: 360, of which three turns take 0.6 of one of all
    assert share([2592], [4], 128) == 128  # nearly 20 turns of all processors
    assert share([72], [1], 32) == 32  # writing would take longer
    assert share([1], [8], 7) == 7  # as many sums as there are gradients
    assert share([150, 2], [1, 100], 128) < 128  # two tiles would take longer than all turns


def test_depth_of_blocks() -> None:
    """Blocks have the depth with less padding; a tuned tile is that of one depth."""
    lengths = (50, 77, 128, 197, 512, 513)
    found = {tokens: weighted_product._candidates((tokens,), 2) for tokens in lengths}
    assert {tokens: tiles[2][0].depth for tokens, (_, tiles) in found.items()} == {
        50: 64, 77: 32, 128: 64, 197: 32, 512: 64, 513: 64,
    }  # fmt: skip
    assert weighted_product._candidates((197, 50), 2) == found[50]
    assert found[197][0] != found[128][0] == weighted_product._candidates((197,), 4)[0]
