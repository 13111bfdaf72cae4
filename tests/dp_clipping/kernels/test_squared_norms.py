"""Squared norms of per-sample gradients, against the reference implementation in float64."""

import pytest
import torch

pytest.importorskip("triton")

from dp_clipping.kernels.squared_norms import BLOCK, squared_norms, squared_norms_plain
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
