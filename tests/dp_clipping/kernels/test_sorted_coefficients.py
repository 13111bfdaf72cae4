"""Coefficients in ascending order, against the reference implementation."""

import torch

from dp_clipping.kernels.coefficients import MOST, SortedCoefficients
from tests.support.kernel_cases import Place, on_kernels


@on_kernels(dtypes=[torch.float32])
def test_ascending(place: Place) -> None:
    """To the last bit: zeros, equal ones, and more than the kernel takes."""
    device = place.device
    torch.manual_seed(0)
    for batch_size in (1, 2, 13, 16, 17, MOST, MOST + 1):
        c = torch.rand(5, batch_size, device=device)
        c[1] = 0
        c[2, ::2] = 0
        c[3] = c[3].mul(3).ceil() / 3
        c[4] *= 1e-30
        c[0, -1] = torch.nan
        found, expected = SortedCoefficients.of(c), SortedCoefficients.plain(c)
        assert torch.equal(found.order, expected.order)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.first, expected.first)
        one, row = SortedCoefficients.of(c[2]), SortedCoefficients.plain(c[2:3])
        assert torch.equal(one.order, row.order)
        assert torch.equal(one.values, row.values)
