"""Operands with the channels last, at their places on a grid."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import torch

from dp_clipping.kernels.convolution import packing
from dp_clipping.kernels.convolution.geometry import ONE, Grid, Target
from dp_clipping.kernels.convolution.packing import pack
from tests.support.kernel_cases import Place, on_kernels

TARGETS = [
    Target(1, 1, 5, Grid(ONE, (2, 3, 4))),
    Target(2, 1, 8, Grid(ONE, (6, 5, 10)), (2, 1, 3)),
    # Not all pixels have places, for want of sizes or of phases.
    Target(1, 5, 8, Grid((1, 2, 3), (2, 2, 2)), (0, 1, 2), (1, 2, 3)),
    Target(1, 5, 8, Grid((1, 1, 2), (2, 2, 2)), (0, 1, 2), (1, 2, 3)),
]


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """Enters a context in which new memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@on_kernels(tf32=True)
def test_places(place: Place) -> None:
    """Any layout that is given comes out channels last, with zeros between the places."""
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    x = torch.randn(2, 5, 2, 3, 4).to(device, dtype)
    y = torch.randn(2, 70, 1, 9, 8).to(device, dtype)
    layouts = [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last_3d),
        lambda x: x.mT.contiguous().mT,
    ]
    for to_x in TARGETS:
        to_y = Target(
            to_x.pictures, 1, 72, Grid(ONE, (1, 10, 9)), rows=(to_x.pictures - 1) * 90 + 80
        )
        wholes = [torch.zeros(to.shape(2), dtype=torch.float64) for to in (to_x, to_y)]
        for given, whole, to in zip((x, y), wholes, (to_x, to_y), strict=True):
            place_in_float64(given.cpu().double(), whole, to)
        for of_x, of_y in product(layouts, repeat=2):
            with memory_of_nan():
                found = pack(of_x(x), of_y(y), to_x, to_y, tf32)
            for one, expected, to in zip(found[:2], wholes, (to_x, to_y), strict=True):
                assert one.is_contiguous()
                back = one.cpu().double()
                if tf32:  # a power of two for each sample, groups of which are side by side
                    samples = (2 // to.pictures, -1)
                    largest = expected.view(samples).abs().amax(1)
                    back = (
                        back.view(samples) * (largest / back.view(samples).abs().amax(1))[:, None]
                    )
                bound = 2.0**-10 if tf32 else 0
                wanted = expected.view(back.shape)
                assert ((back - wanted).abs() <= bound * wanted.abs()).all()


def test_batches_of_other_sizes_have_the_same_places() -> None:
    """No batch of a new size makes the host wait for a copy."""
    to_x = Target(1, 1, 8, Grid(ONE, (1, 7, 11)), (0, 3, 1))  # of no other test
    to_y = Target(1, 1, 8, Grid(ONE, (1, 7, 11)))
    with patch.object(packing, "places_of_pixels", wraps=packing.places_of_pixels) as made:
        for size in range(1, 4):
            x, y = torch.ones(size, 5, 1, 4, 9), torch.ones(size, 5, 1, 5, 9)
            packing._work_of(x.shape, y.shape, x.stride(), y.stride(), False, to_x, to_y, x.device)
    assert made.call_count == 2


def place_in_float64(x: torch.Tensor, result: torch.Tensor, to: Target) -> None:
    """Packs by reference, pixel by pixel."""
    channels = x.shape[1] // to.groups
    for n, channel, *pixel in product(*map(range, x.shape)):
        padded = [p + more for p, more in zip(pixel, to.padding, strict=True)]
        phase = [p % step for p, step in zip(padded, to.stride, strict=True)]
        at = [p // step for p, step in zip(padded, to.stride, strict=True)]
        if any(f >= count for f, count in zip(phase, to.grid.phases, strict=True)):
            continue
        if any(z >= size for z, size in zip(at, to.grid.sizes, strict=True)):
            continue
        row = 0
        places = (*phase, n % to.pictures, *at)
        counts = (*to.grid.phases, to.pictures, *to.grid.sizes)
        for place, count in zip(places, counts, strict=True):
            row = row * count + place
        sample = n // to.pictures * to.groups + channel // channels
        result[sample, row, channel % channels] = x[(n, channel, *pixel)]


@on_kernels(dtypes=(), tf32=True)
def test_largest(place: Place) -> None:
    """Looks through operands of any layout and size, with several pictures a sample."""
    x = torch.randn(6, 3, 2, 5, 7)
    x[2, 1, 0, 3, 3], x[5, 2, 1, 4, 6] = -100.0, torch.inf
    long = torch.randn(6, 1, 1, 1, packing.PARTS * packing.LARGEST_BLOCK + 5)
    long[3, 0, 0, 0, -1] = -50.0
    cases = [x, x.to(memory_format=torch.channels_last_3d), x.mT.contiguous().mT, x[..., :4], long]
    cases.append(torch.ones(6, 1, 1, 1, 1).expand(6, 2, 1, 3, 3))
    for samples in (6, 2):
        found = packing.largest_of([one.to(place.device) for one in cases], samples)
        for one, parts in zip(cases, found, strict=True):
            expected = one.abs().reshape(samples, -1).amax(1)
            assert torch.equal(parts.amax(1).cpu(), expected)


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
