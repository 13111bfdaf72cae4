"""Convolutions for the tests of their kernels."""

import torch
from torch import Tensor

from dp_clipping.kernels.convolution.geometry import Geometry, gradients_plain

# samples, pictures of each, C, O, pixels, geometry
WIDE = [
    (2, 1, 16, 20, (1, 6, 5), Geometry((1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)),
    (3, 2, 32, 32, (1, 5, 7), Geometry((1, 3, 2), (1, 2, 1), (0, 1, 0), (1, 1, 2), 2)),
    (2, 1, 17, 19, (3, 4, 3), Geometry((2, 3, 1), (1, 1, 2), (1, 1, 0), (1, 1, 1), 1)),
    (2, 1, 3, 24, (1, 9, 9), Geometry((1, 5, 5), (1, 2, 2), (0, 2, 2), (1, 1, 1), 1)),
    (2, 1, 48, 5, (1, 4, 4), Geometry((1, 3, 3), (1, 1, 1), (0, 2, 2), (1, 2, 2), 1)),
    (2, 1, 1, 24, (1, 1, 40), Geometry((1, 1, 10), (1, 1, 5), (0, 0, 3), (1, 1, 1), 1)),
    # Taps of a row that meet two phases in turn.
    (2, 1, 24, 8, (1, 9, 9), Geometry((1, 3, 3), (1, 2, 2), (0, 1, 1), (1, 1, 1), 1)),
    # A stride beyond the taps, and with a dilation: pixels that no tap meets.
    (2, 2, 16, 8, (1, 9, 9), Geometry((1, 1, 1), (1, 2, 2), (0, 0, 0), (1, 1, 1), 1)),
    (2, 1, 16, 8, (1, 12, 11), Geometry((1, 3, 3), (1, 3, 2), (0, 1, 4), (1, 2, 3), 1)),
    # The grid has the sizes of the pixels, which lie at other places in it.
    (2, 1, 8, 8, (1, 3, 3), Geometry((1, 1, 1), (1, 2, 2), (0, 1, 1), (1, 1, 1), 1)),
    # Few channels and many taps.
    (2, 1, 1, 8, (1, 9, 9), Geometry((1, 6, 6), (1, 2, 2), (0, 2, 2), (1, 1, 1), 1)),
]
NARROW = [
    (2, 2, 6, 6, (1, 5, 7), Geometry((1, 3, 3), (1, 2, 1), (0, 1, 1), (1, 1, 1), 6)),
    (3, 1, 4, 8, (3, 5, 4), Geometry((2, 3, 2), (1, 1, 1), (0, 1, 0), (1, 1, 2), 2)),
    # Rows of several segments and parts; taps that move on by two pixels a position.
    (2, 1, 3, 3, (1, 1, 150), Geometry((1, 1, 11), (1, 1, 1), (0, 0, 5), (1, 1, 1), 3)),
    (2, 1, 1, 8, (1, 7, 6), Geometry((1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)),
    (2, 1, 5, 5, (1, 4, 19), Geometry((1, 2, 7), (1, 1, 2), (0, 0, 3), (1, 1, 2), 5)),
]
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 8e-3}  # of the largest of G
TF32 = 2e-3


def operands(case: tuple, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and G in float64; samples are of different sizes."""
    size, pictures, channels, outputs, pixels, geometry = case
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size * pictures, channels, *pixels, generator=draw)
    weight = torch.zeros(outputs, channels // geometry.groups, *geometry.taps)
    options = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    shape = torch.conv3d(x, weight, None, *options).shape
    y = torch.randn(shape, generator=draw) * 10.0 ** -torch.arange(len(x)).view(-1, 1, 1, 1, 1)
    x, y = x.to(device, dtype), y.to(device, dtype)
    return x, y, gradients_plain(x.double(), y.double(), geometry, size)
