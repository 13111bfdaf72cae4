"""Squared norms of per-sample gradients, against the reference implementation in float64."""

import torch

from dp_clipping.clipping.accumulation import product_squares
from dp_clipping.kernels.squared_norms import (
    BLOCK,
    squared_norms,
    squared_norms_plain,
    squares_of_products,
    squares_of_vectors,
)
from tests.support.kernel_cases import Place, on_kernels


@on_kernels()
def test_squares(place: Place) -> None:
    device, dtype = place.device, place.dtype
    torch.manual_seed(0)
    for shape in [(3, 1), (1, BLOCK), (2, BLOCK + 1), (4, 3, 50), (0, 5), (2, 0)]:
        g = torch.randn(shape).to(device, dtype)
        torch.testing.assert_close(squared_norms(g), squared_norms_plain(g), rtol=2e-6, atol=0)
    g = torch.randn(6, 4).to(device, dtype).t()
    torch.testing.assert_close(squared_norms(g), squared_norms_plain(g), rtol=2e-6, atol=0)


@on_kernels()
def test_squares_of_vectors(place: Place) -> None:
    """A vector's result does not depend on what shares its launch."""
    torch.manual_seed(0)
    widths = (1, 50, 0, BLOCK + 1)
    several = [torch.randn(3, n).to(place.device, place.dtype) for n in widths]
    several += [torch.randn(6, 3).to(place.device, place.dtype).t(), several[-1][:, :7]]
    expected = torch.stack([squared_norms_plain(g) for g in several])
    torch.testing.assert_close(squares_of_vectors(several), expected, rtol=2e-6, atol=0)
    nothing = torch.zeros(0, 5, device=place.device, dtype=place.dtype)
    assert squares_of_vectors([nothing, nothing]).shape == (2, 0)


@on_kernels()
def test_squares_of_products(place: Place) -> None:
    """Factors of any size, also those whose own squares 32 bits do not hold."""
    torch.manual_seed(0)
    large = torch.finfo(place.dtype).max / 2
    pairs = []
    for outputs, inputs in ((1, 7), (10, BLOCK + 1), (0, 3)):
        y, a = torch.randn(6, outputs), torch.randn(6, inputs)
        y[1], a[1] = 1 / large, large**0.5
        y[2] = large
        a[3, :1] = torch.inf
        y[4, :1] = torch.nan
        a[5] = 0
        pairs.append((y.to(place.device, place.dtype), a.to(place.device, place.dtype)))
    pairs.append((pairs[0][1].t().contiguous().t(), pairs[1][1][:, :5]))
    expected = torch.stack([product_squares(y.float(), a.float()) for y, a in pairs])
    found = squares_of_products(pairs)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0, equal_nan=True)
    assert squares_of_products([(y[:0], a[:0]) for y, a in pairs]).shape == (4, 0)
