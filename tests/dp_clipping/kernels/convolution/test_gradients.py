"""G, its norm and the clipped sum, against the reference implementation in float64."""

from unittest.mock import patch

import torch

from dp_clipping.kernels.convolution.geometry import Geometry
from dp_clipping.kernels.convolution.gradients import gradients_and_squares, weighted_sum
from dp_clipping.kernels.convolution.packing import pack
from dp_clipping.layers import convolution
from tests.support.convolution_cases import DTYPES, TF32, WIDE, operands
from tests.support.kernel_cases import Place, on_kernels


@on_kernels(tf32=True)
def test_wide(place: Place) -> None:
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    for case in WIDE:
        size, *_, geometry = case
        x, y, right = operands(case, dtype, device)
        packed = pack(x, y, size, tf32, geometry.padding)
        found, squares = gradients_and_squares(*packed, geometry, size)
        bound = TF32 if tf32 else DTYPES[dtype]
        for own, expected in zip(found.movedim(3, 2).double(), right, strict=True):
            assert (own - expected).abs().max() <= bound * expected.abs().max()
        torch.testing.assert_close(squares, found.double().square().sum((1, 2, 3)).float())
        _, alone = gradients_and_squares(*packed, geometry, size, store=False)
        x[-1], y[-1] = torch.nan, torch.inf  # a sample that is left out is not read
        packed = pack(x, y, size, tf32, geometry.padding)
        for i in range(size - 1):
            c = torch.zeros(size, device=device)
            c[i] = 1
            total = weighted_sum(*packed, geometry, c).movedim(2, 1)  # as G is stored
            assert torch.equal(total.to(found.dtype), found[i])  # what is summed is what was normed
            torch.testing.assert_close(total.double().square().sum().float(), alone[i])
        c = torch.rand(size, device=device)
        c[-1] = 0
        total = weighted_sum(*packed, geometry, c).double()
        expected = (c[:-1, None, None, None] * right[:-1]).sum(0)
        assert (total - expected).abs().max() <= bound * expected.abs().max()


@on_kernels()
def test_pieces(place: Place) -> None:
    """Packed one sample after another, large operands have the same G and norms.

    Where a launch would have too few programs, all are packed.
    """
    case = (3, 2, 16, 8, (1, 9, 9), Geometry((1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1))
    size, *_, geometry = case
    x, y, right = operands(case, place.dtype, place.device)
    found, packed = [], []
    for most, programs in ((1 << 26, 1), (1, 1), (1, 7)):
        convolution._samples_at_a_time.cache_clear()
        with (
            patch.object(convolution, "PACKED_BYTES", most),
            patch.object(convolution, "LEAST_PROGRAMS", programs),
            patch.object(convolution, "pack", lambda x, *a: packed.append(len(x)) or pack(x, *a)),
        ):
            use = convolution.Factors(x, y, torch.Size((8, 16, 1, 3, 3)), size, geometry, False)
            kernels = use.on_kernels()
            found.append((kernels.take_norm(True).squared, kernels.gradients))
    assert packed == [6] + [2] * 3 + [6]
    for one, other, as_before in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, as_before)
    own = found[1][1].movedim(3, 2).double()
    bound = TF32 if place.dtype == torch.float32 else DTYPES[place.dtype]  # PyTorch's default
    assert (own - right).abs().max() <= bound * right.abs().max()


@on_kernels(tf32=True)
def test_nothing(place: Place) -> None:
    """No samples, and a padding that no tap leaves."""
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    geometry = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    empty = torch.zeros(0, 16, 1, 2, 2, device=device, dtype=dtype)
    none = pack(empty, empty, 0, tf32)
    found, squares = gradients_and_squares(*none, geometry, 0)
    assert found.shape == (0, 16, 1, 16)
    assert squares.shape == (0,)
    assert not weighted_sum(*none, geometry, torch.zeros(0, device=device)).any()
    zeros = torch.zeros(2, 16, 1, 2, 2, device=device, dtype=dtype)
    packed = pack(zeros, zeros, 2, tf32)
    assert not gradients_and_squares(*packed, geometry, 2)[1].any()
