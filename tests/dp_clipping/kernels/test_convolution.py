"""Kernels of convolutions: in Triton's interpreter here, compiled on a GPU."""

from math import prod

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dp_clipping.kernels.convolution import (
    Geometry,
    gradients_and_squares,
    gradients_plain,
    narrow_gradients,
    pack,
    weighted_sum,
)

DTYPES = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 8e-3}  # of the largest of G
TF32 = 2e-3
# samples, pictures of each, C, O, pixels, geometry
WIDE = [
    (2, 1, 16, 20, (1, 6, 5), Geometry((1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)),
    (3, 2, 32, 32, (1, 5, 7), Geometry((1, 3, 2), (1, 2, 1), (0, 1, 0), (1, 1, 2), 2)),
    (2, 1, 17, 19, (3, 4, 3), Geometry((2, 3, 1), (1, 1, 2), (1, 1, 0), (1, 1, 1), 1)),
]
NARROW = [
    (2, 2, 6, 6, (1, 5, 7), Geometry((1, 3, 3), (1, 2, 1), (0, 1, 1), (1, 1, 1), 6)),
    (3, 1, 4, 8, (3, 5, 4), Geometry((2, 3, 2), (1, 1, 1), (0, 1, 0), (1, 1, 2), 2)),
]


def operands(case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and G in float64."""
    size, pictures, channels, outputs, pixels, geometry = case
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size * pictures, channels, *pixels, generator=draw)
    weight = torch.zeros(outputs, channels // geometry.groups, *geometry.taps)
    options = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    shape = torch.conv3d(x, weight, None, *options).shape
    y = torch.randn(shape, generator=draw) * 10.0 ** -torch.arange(len(x)).view(-1, 1, 1, 1, 1)
    x, y = x.to(device, dtype), y.to(device, dtype)
    return x, y, gradients_plain(x.double(), y.double(), geometry, size)


def check_wide(device: str, dtype: torch.dtype, tf32: bool) -> None:
    for case in WIDE:
        size, *_, geometry = case
        x, y, right = operands(case, dtype, device)
        packed = pack(x, size, tf32), pack(y, size, tf32)
        found, squares = gradients_and_squares(*packed, geometry, size)
        bound = TF32 if tf32 else DTYPES[dtype]
        for own, expected in zip(found.movedim(3, 2).double(), right, strict=True):
            assert (own - expected).abs().max() <= bound * expected.abs().max()
        torch.testing.assert_close(squares.double(), found.double().square().sum((1, 2, 3)))
        _, alone = gradients_and_squares(*packed, geometry, size, store=False)
        x[-1], y[-1] = torch.nan, torch.inf  # a sample that is left out is not read
        packed = pack(x, size, tf32), pack(y, size, tf32)
        for i in range(size - 1):
            c = torch.zeros(size, device=device)
            c[i] = 1
            total = weighted_sum(*packed, geometry, c)
            assert torch.equal(total.to(found.dtype), found[i])  # what is summed is what was normed
            torch.testing.assert_close(total.double().square().sum().float(), alone[i])
        c = torch.rand(size, device=device)
        c[-1] = 0
        total = weighted_sum(*packed, geometry, c).movedim(2, 1).double()
        expected = (c[:-1, None, None, None] * right[:-1]).sum(0)
        assert (total - expected).abs().max() <= bound * expected.abs().max()


def check_narrow(device: str, dtype: torch.dtype, tf32: bool) -> None:
    for case in NARROW:
        x, y, right = operands(case, dtype, device)
        found = narrow_gradients(x, y, case[-1], case[0]).double()
        assert (found - right).abs().max() <= 1e-6 * right.abs().max() * prod(x.shape[2:])


def check_nothing(device: str, dtype: torch.dtype, tf32: bool) -> None:
    """No samples, and a padding that no tap leaves."""
    geometry = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    none = pack(torch.zeros(0, 16, 1, 2, 2, device=device, dtype=dtype), 0, tf32)
    found, squares = gradients_and_squares(none, none, geometry, 0)
    assert found.shape == (0, 16, 1, 16)
    assert squares.shape == (0,)
    assert not weighted_sum(none, none, geometry, torch.zeros(0, device=device)).any()
    zeros = pack(torch.zeros(2, 16, 1, 2, 2, device=device, dtype=dtype), 2, tf32)
    assert not gradients_and_squares(zeros, zeros, geometry, 2)[1].any()


def check_packing(device: str, dtype: torch.dtype, tf32: bool) -> None:
    """Each sample keeps its digits, however small or large the others are."""
    if dtype != torch.float32 or not tf32:
        return
    scales = torch.tensor([1e-30, 1.0, 1e30]).view(3, 1, 1, 1, 1)
    x = (torch.randn(3, 2, 1, 3, 5) * scales).to(device)
    packed = pack(x, 3, True)
    assert packed.values.dtype == torch.float16
    factors = 2.0 ** packed.exponents.double().view(3, 1, 1, 1, 1)
    back = packed.values.double().movedim(-1, 1) * factors
    assert ((back - x.double()).abs() <= 2.0**-11 * x.double().abs()).all()


BODIES = [check_packing, check_wide, check_narrow, check_nothing]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_in_the_interpreter(interpreter, body, tf32):
    interpreter.run(body, "cpu", torch.float32, tf32)
    if not tf32:
        interpreter.run(body, "cpu", torch.float16, tf32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_compiled(body, dtype, tf32):
    body("cuda", dtype, tf32 and dtype == torch.float32)
