"""Operands with the channels last, beside PyTorch's padding."""

import torch
import torch.nn.functional as F

from dp_clipping.kernels.convolution.packing import pack, scale_of
from tests.support.kernel_cases import Place, on_kernels

PADDING = (2, 1, 3)


@on_kernels(tf32=True)
def test_places(place: Place) -> None:
    """Any layout that is given comes out channels last, with zeros around it."""
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    x = torch.randn(2, 5, 2, 3, 4).to(device, dtype)
    layouts = [x, x.to(memory_format=torch.channels_last_3d), x.mT.contiguous().mT]
    for padding in ((0, 0, 0), PADDING):
        expected = F.pad(x, [p for p in reversed(padding) for _ in (0, 1)]).movedim(1, -1)
        for given in layouts:
            packed = pack(given, 2, tf32, padding)
            assert packed.values.is_contiguous()
            back = packed.values.double()
            if packed.largest is not None:
                back *= scale_of(packed.largest).double().view(2, 1, 1, 1, 1)
            bound = 0 if packed.largest is None else 2.0**-11
            assert ((back - expected.double()).abs() <= bound * expected.double().abs()).all()


@on_kernels(dtypes=(), tf32=True)
def test_digits(place: Place) -> None:
    """Each sample keeps its digits, however small or large the others are."""
    device = place.device
    scales = torch.tensor([1e-30, 1.0, 1e30]).view(3, 1, 1, 1, 1)
    x = (torch.randn(3, 2, 1, 3, 5) * scales).to(device)
    packed = pack(x, 3, True)
    assert packed.values.dtype == torch.float16
    factors = scale_of(packed.largest).double().view(3, 1, 1, 1, 1)
    back = packed.values.double().movedim(-1, 1) * factors
    assert ((back - x.double()).abs() <= 2.0**-11 * x.double().abs()).all()


def test_what_lies_right_is_not_copied():
    x = torch.randn(2, 5, 1, 3, 4).to(memory_format=torch.channels_last_3d)
    assert pack(x, 2, False).values.data_ptr() == x.data_ptr()
