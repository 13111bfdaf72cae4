"""Gradients of GroupNorm's weight and bias, against the reference implementation in float64."""

import torch

from dp_clipping.kernels.channel_sums import Channels, channel_sums
from tests.support.kernel_cases import Place, on_kernels


@on_kernels()
def test_channel_sums(place: Place) -> None:
    device, dtype = place.device, place.dtype
    draw = torch.Generator().manual_seed(0)
    uses = []
    for shape, groups in (((3, 6, 5, 7), 2), ((2, 4, 1100), 4), ((2, 6), 3), ((4, 2, 3, 9), 2)):
        x, y = (torch.randn(shape, generator=draw).to(device, dtype) + 3 for _ in range(2))
        rows = x.float().reshape(shape[0], groups, -1)
        mean, rstd = rows.mean(2), rows.var(2).add(1e-5).rsqrt()
        uses.append(Channels(x, y, mean, rstd, batch_size=2 if shape[0] == 4 else shape[0]))
    for use, found in zip(uses, channel_sums(uses), strict=True):
        for own, expected in zip(found, use.plain(), strict=True):
            torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-3)
