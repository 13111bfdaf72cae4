"""Squared norms of per-sample gradients, against the reference implementation in float64."""

import torch

from dp_clipping.clipping.accumulation import product_squares
from dp_clipping.kernels.squared_norms import (
    BLOCK,
    TILES,
    squared_norms,
    squared_norms_plain,
    squares_of_products,
    squares_of_tiles,
    squares_of_tiles_plain,
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


@on_kernels()
def test_squares_of_tiles(place: Place) -> None:
    """Of whole batches and of pieces, with groups and scales; what no tile has written is not
    read, and squares that 32 bits do not hold together with their scale are no zeros."""
    torch.manual_seed(0)
    device, size = place.device, 5
    parts = torch.rand(3, size, TILES + 9, device=device)
    parts[1, :, 7:] = torch.nan
    of_groups = torch.rand(1, size * 3, 4, device=device)
    of_groups[..., 2:] = torch.nan
    scale = torch.tensor([1.0, 1e-30, 2.0, 0.0, 1e30], device=device)
    tiny = torch.full((1, size, 1), 1e30, device=device)
    pieces = torch.rand(1, 3, 4, device=device), torch.rand(1, 2, 6, device=device)
    pieces[0][0, 2] = torch.inf
    tiles = [
        [(parts, 0, TILES + 9)],
        [(parts, 1, 7)],
        [(of_groups, 0, 2)],
        [(tiny, 0, 1)],
        [(pieces[0], 0, 4), (pieces[1], 0, 6)],
    ]
    groups, scales = [1, 1, 3, 1, 1], [None, None, scale, scale, scale]
    each = zip(tiles, groups, scales, strict=True)
    expected = torch.stack([squares_of_tiles_plain(*one) for one in each])
    found = squares_of_tiles(tiles, groups, scales, size)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert (found[:3, 0] > 0).all()
    assert 0 < found[3, 1] < 1e-29
    nothing = [[(parts[:, :0], n, 1)] for n in (0, 1)]
    assert squares_of_tiles(nothing, [1, 1], [None, None], 0).shape == (2, 0)
