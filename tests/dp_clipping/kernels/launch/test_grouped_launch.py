"""Kernels that serve many layers in one launch, beside a launch for each."""

from unittest.mock import patch

import torch

from dp_clipping.kernels import gradient
from dp_clipping.kernels import weighted_product as products
from dp_clipping.kernels.coefficients import SortedCoefficients
from dp_clipping.kernels.gradient import (
    gradient_and_squares,
    gradient_and_squares_plain,
    gradients_and_squares,
    squares_of_tiles,
)
from dp_clipping.kernels.launch import grouped_launch
from dp_clipping.kernels.launch.grouped_launch import Pair, launches, operands_of
from dp_clipping.kernels.weighted_product import (
    weighted_product,
    weighted_product_plain,
    weighted_products,
)
from dp_clipping.kernels.weighted_sum import weighted_sum_plain, weighted_sums
from tests.support.kernel_cases import FEATURES, Place, on_kernels, pairs_of

MOST = 9  # layers of a launch


@on_kernels()
@patch.object(grouped_launch, "MOST_ROWS", MOST)
def test_products(place: Place) -> None:
    """Each layer gets what a launch of its own would give it, whatever is beside it."""
    device, dtype, tile = place.device, place.dtype, place.tile
    three = pairs_of(device, dtype, 3, 20, MOST + 1) + pairs_of(device, dtype, 3, 35, 2)
    for store in (True, False):
        gradients, squares = gradients_and_squares(three, tile, store)
        found = squares_of_tiles(
            [[one] for one in squares], [1] * len(three), [None] * len(three), 3
        )
        for (y, a), g, own in zip(three, gradients, found, strict=True):
            with patch.object(gradient, "LARGE", 0):
                g_alone, alone = gradient_and_squares(y, a, tile, store)
            torch.testing.assert_close(own, alone, rtol=1e-6, atol=0)
            assert (g is None and g_alone is None) or torch.equal(g, g_alone)
    c = torch.tensor([[0.5, 0.0, 2.0], [0.0, 0.0, 0.0], [1.0, 0.25, 1e-6]], device=device)
    three[1][0][1] = torch.nan  # left out by the first group, which it belongs to
    groups = [0 if n == 1 else n % 3 for n in range(len(three))]
    totals = weighted_products(three, SortedCoefficients.of(c), groups, tile)
    for (y, a), total, group in zip(three, totals, groups, strict=True):
        expected = weighted_product_plain(y, a, c[group])
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        with patch.object(products, "LARGE", 0):
            alone = weighted_product(y, a, SortedCoefficients.of(c[group]), tile)
        torch.testing.assert_close(total, alone, rtol=1e-6, atol=1e-6)


@on_kernels()
def test_products_of_one_left(place: Place) -> None:
    """A pair with places has the results of each, beside another pair and over several shares."""
    device, dtype, tile = place.device, place.dtype, place.tile
    torch.manual_seed(0)
    y, other, memory = (
        torch.randn(32, *sizes).to(device, dtype) for sizes in ((20, 16), (20, 24), (29, 32))
    )
    starts = (0, 3, 7)
    pairs = [(y, other), (y, memory[:, :20], tuple(start * 32 for start in starts))]
    c = torch.rand(1, 32, device=device)
    gradients, (_, squares) = gradients_and_squares(pairs, tile)
    totals = weighted_products(pairs, SortedCoefficients.of(c), [0, 0], tile)
    expected = torch.zeros(32, device=device)
    for n, start in enumerate(starts):
        right = memory[:, start : start + 20]
        plain, norms = gradient_and_squares_plain(y, right)
        torch.testing.assert_close(gradients[1][:, n], plain, rtol=1e-2, atol=1e-2)
        expected += norms
        product = weighted_product_plain(y, right, c[0])
        torch.testing.assert_close(totals[1][n], product, rtol=1e-4, atol=1e-4)
    (norms,) = squares_of_tiles([[squares]], [1], [None], 32)
    torch.testing.assert_close(norms, expected, rtol=1e-3, atol=0)


@on_kernels()
def test_sums(place: Place) -> None:
    """Also where a gradient does not start at a multiple of 16 bytes."""
    device, dtype = place.device, place.dtype
    torch.manual_seed(0)
    c = torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.25, 1e-6]], device=device)
    gradients = [torch.randn(3, *shape).to(device, dtype) for shape in [*FEATURES, (5000,)] * 3]
    memory = torch.randn(1 + 3 * 32).to(device, dtype)
    gradients.append(memory[1:].view(3, 32))
    gradients[0][1] = torch.inf
    groups = [n % 2 for n in range(len(gradients))]
    for g, total, group in zip(gradients, weighted_sums(gradients, c, groups), groups, strict=True):
        expected = weighted_sum_plain(g, c[group])
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    one = memory[1:].view(1, 96)
    (total,) = weighted_sums([one], torch.ones(1, 1, device=device), [0])
    assert torch.equal(total, one[0].float())


def test_rows_that_the_copy_engine_does_not_take_have_a_launch_of_their_own() -> None:
    """Among others, as those of a head of two classes, they would make all of them slow."""

    def pair(tokens: int, rows: int, columns: int) -> Pair:
        return tuple([torch.zeros(2, tokens, n, dtype=torch.float16) for n in (rows, columns)])

    pairs = [pair(4, 8, 16), pair(1, 2, 16), pair(1, 16, 8), pair(4, 16, 12)]
    found = launches(pairs, 1e11, {})
    assert found == [((0, 2), False), ((1, 3), False)]
    for numbers, is_taken in zip((n for n, _ in found), (True, False), strict=True):
        assert operands_of([pairs[n] for n in numbers]).described is is_taken
