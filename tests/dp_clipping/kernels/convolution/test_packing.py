"""Operands with the channels last, at their places on a grid."""

import torch

from dp_clipping.kernels.convolution.geometry import ONE, Grid, Target
from dp_clipping.kernels.convolution.packing import pack
from tests.support.kernel_cases import Place, on_kernels


@on_kernels(dtypes=(), tf32=True)
def test_digits(place: Place) -> None:
    """Each sample keeps its digits, however small or large the others are."""
    scales = torch.tensor([1e-30, 1.0, 1e15]).view(3, 1, 1, 1, 1)
    x = (torch.randn(3, 2, 1, 3, 5) * scales).to(place.device)
    to = Target(1, 1, 2, Grid(ONE, (1, 3, 5)))
    packed, other, scale = pack(x, torch.ones_like(x), to, to, True)
    assert packed.dtype == torch.float16
    back = packed.double() * scale.double().view(3, 1, 1) * other[0, 0, 0].double()
    wanted = x.double().flatten(2).mT
    assert ((back - wanted).abs() <= 2.0**-11 * wanted.abs()).all()


def test_what_lies_right_is_not_copied():
    given = [torch.randn(2, n, 1, 3, 4).to(memory_format=torch.channels_last_3d) for n in (8, 16)]
    targets = [Target(1, 1, n, Grid(ONE, (1, 3, 4))) for n in (8, 16)]
    for one, packed in zip(given, pack(*given, *targets), strict=False):
        assert packed.data_ptr() == one.data_ptr()
