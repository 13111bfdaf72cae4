"""Depthwise convolutions, against the reference implementation in float64."""

from math import prod

from dp_clipping.kernels.convolution.narrow import narrow_gradients
from tests.support.convolution_cases import NARROW, operands
from tests.support.kernel_cases import Place, on_kernels


@on_kernels()
def test_narrow(place: Place) -> None:
    device, dtype = place.device, place.dtype
    for case in NARROW:
        x, y, right = operands(case, dtype, device)
        found = narrow_gradients(x, y, case[-1], case[0]).double()
        assert (found - right).abs().max() <= 1e-6 * right.abs().max() * prod(x.shape[2:])
