"""Operands with the channels last, beside PyTorch's padding."""

from itertools import product

import torch
import torch.nn.functional as F

from dp_clipping.kernels.convolution.packing import NO_PADDING, pack, scale_of
from tests.support.kernel_cases import Place, on_kernels

PADDING = (2, 1, 3)


@on_kernels(tf32=True)
def test_places(place: Place) -> None:
    """Any layout that is given comes out channels last, with zeros around it."""
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    x = torch.randn(2, 5, 2, 3, 4).to(device, dtype)
    y = torch.randn(2, 70, 1, 9, 8).to(device, dtype)
    layouts = [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last_3d),
        lambda x: x.mT.contiguous().mT,
    ]
    for padding in (NO_PADDING, PADDING):
        padded = F.pad(x, [p for p in reversed(padding) for _ in (0, 1)])
        for of_x, of_y in product(layouts, repeat=2):
            both = pack(of_x(x), of_y(y), 2, tf32, padding)
            for packed, expected in zip(both, (padded, y), strict=True):
                assert packed.values.is_contiguous()
                back = packed.values.double()
                if packed.largest is not None:
                    back *= scale_of(packed.largest).double().view(2, 1, 1, 1, 1)
                bound = 0 if packed.largest is None else 2.0**-11
                wanted = expected.movedim(1, -1).double()
                assert ((back - wanted).abs() <= bound * wanted.abs()).all()


@on_kernels(dtypes=(), tf32=True)
def test_digits(place: Place) -> None:
    """Each sample keeps its digits, however small or large the others are."""
    device = place.device
    scales = torch.tensor([1e-30, 1.0, 1e30]).view(3, 1, 1, 1, 1)
    x = (torch.randn(3, 2, 1, 3, 5) * scales).to(device)
    packed, other = pack(x, x.flip(0), 3, True)
    assert torch.equal(other.values, packed.values.flip(0))
    assert packed.values.dtype == torch.float16
    factors = scale_of(packed.largest).double().view(3, 1, 1, 1, 1)
    back = packed.values.double().movedim(-1, 1) * factors
    assert ((back - x.double()).abs() <= 2.0**-11 * x.double().abs()).all()


def test_what_lies_right_is_not_copied():
    given = [torch.randn(2, n, 1, 3, 4).to(memory_format=torch.channels_last_3d) for n in (5, 3)]
    for one, packed in zip(given, pack(*given, 2, False), strict=True):
        assert packed.values.data_ptr() == one.data_ptr()
