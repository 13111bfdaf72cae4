"""The backward of GroupNorm, against reference implementations in float64."""

from math import prod

import torch

from dp_clipping.kernels.group_norm import channel_sums_plain, group_norm_backward
from tests.support.kernel_cases import Place, on_kernels

SHAPES: list = [
    ((3, 6, 5, 7), 2),
    ((2, 4, 1100), 4),
    ((2, 6), 3),
    ((4, 3, 2, 4, 4), 1),
    ((0, 4, 3), 2),
    ((2, 3, 70, 90), 1),  # a program for each channel
]
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@on_kernels()
def test_backward(place: Place) -> None:
    for shape, groups in SHAPES:
        _check(place, shape, groups)


def _check(place: Place, shape: tuple[int, ...], groups: int) -> None:
    device, dtype = place.device, place.dtype
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=draw).to(device, dtype) + 3 for _ in range(2))
    weight = torch.randn(shape[1], generator=draw).to(device, dtype)
    rows = x.double().reshape(shape[0], groups, prod(shape[1:]) // groups)
    mean, variance = rows.mean(2), rows.var(2, correction=0)
    mean, rstd = mean.float(), variance.add(1e-5).rsqrt().float()

    sums, found = group_norm_backward(x, y, mean, rstd, weight)
    expected = torch.stack(channel_sums_plain(x, y, mean, rstd))
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)
    only, none = group_norm_backward(x, y, mean, rstd, weight, wants_x=False)
    assert none is None
    assert torch.equal(only, sums)

    wide = x.double().requires_grad_()
    normalized = torch.nn.functional.group_norm(wide, groups, weight.double(), None, 1e-5)
    (expected,) = torch.autograd.grad(normalized, wide, y.double())
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=10 * rounding)
