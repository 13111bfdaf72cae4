"""Norms from Gram matrices of positions, against the reference implementation in float64."""

import torch

from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels.convolution import gram
from dp_clipping.kernels.convolution.geometry import Geometry
from dp_clipping.kernels.convolution.layout import folded, layout_of
from dp_clipping.kernels.convolution.packing import pack
from tests.support.convolution_cases import WIDE, operands
from tests.support.kernel_cases import Place, on_kernels

CASES = [case for case in WIDE if case[-1].groups == 1] + [
    (2, 3, 600, 16, (1, 3, 3), Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1))
]


def gram_squares(x, y, size, geometry, tf32):
    layout = layout_of(x.shape, y.shape, 2, len(x) // size, geometry)
    x = folded(x, geometry, layout) if layout.folds else x
    return gram.gram_squares(pack(x, y, layout.to_x, layout.to_y, tf32), layout)


@on_kernels(dtypes=[torch.float16, torch.bfloat16], tf32=True)
def test_squares(place: Place) -> None:
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    for case in CASES:
        size, *_, geometry = case
        x, y, right = operands(case, dtype, device)
        squares, scales = gram_squares(x, y, size, geometry, tf32)
        plain, plain_scales = gram.gram_squares_plain(x, y, geometry, size)
        exact = right.square().sum((1, 2, 3))
        torch.testing.assert_close(plain.double(), exact, rtol=1e-6, atol=0)
        digits = 2.0**-9 if tf32 else 0.0  # of the packed operands
        allowed = (GRAM_ROUNDING + digits) * plain_scales.double().square()
        assert ((squares.double() - exact).abs() <= allowed).all()
        torch.testing.assert_close(scales, plain_scales, rtol=2e-3 if tf32 else 1e-5, atol=0)


@on_kernels(dtypes=[torch.float16, torch.bfloat16], tf32=True)
def test_cancelling(place: Place) -> None:
    """Positions of which half undo the other: the error stays below what is allowed for."""
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    geometry = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    x = torch.randn(1, 256, 1, 4, 8).to(device, dtype)
    y = torch.randn(1, 32, 1, 4, 8).to(device, dtype)
    x[:, :, :, 2:], y[:, :, :, 2:] = x[:, :, :, :2], -y[:, :, :, :2]
    squares, scales = gram_squares(x, y, 1, geometry, tf32)
    assert squares.abs() <= GRAM_ROUNDING * scales.square()


def test_few_positions_of_many_channels_pay():
    geometry = Geometry((1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)

    def pays(side: int, channels: int, of=geometry, dtype=torch.bfloat16) -> bool:
        shape = torch.Size((1, channels, 1, side, side))
        return gram.pays(layout_of(shape, shape, dtype.itemsize, 1, of), dtype.itemsize)

    assert pays(7, 512)
    assert pays(8, 256)
    assert not pays(14, 256)
    assert not pays(8, 16)
    assert not pays(7, 512, dtype=torch.float32)
    assert not pays(7, 512, of=geometry._replace(groups=2))
    assert not pays(1, 512)  # one position cannot cancel: G's own norm is exact
