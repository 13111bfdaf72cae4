"""Gradients of GroupNorm's weight and bias: in the interpreter here, compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from dp_clipping.kernels.channel_sums import channel_sums, channel_sums_plain


def check(device: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for shape, groups in (((3, 6, 5, 7), 2), ((2, 4, 1100), 4), ((2, 6), 3)):
        x, y = (torch.randn(shape, generator=draw).to(device, dtype) + 3 for _ in range(2))
        rows = x.float().reshape(shape[0], groups, -1)
        mean, rstd = rows.mean(2), rows.var(2).add(1e-5).rsqrt()
        right = channel_sums_plain(*(z.double() for z in (x, y, mean, rstd)))
        for own, expected in zip(channel_sums(x, y, mean, rstd), right, strict=True):
            torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter(interpreter, dtype):
    interpreter.run(check, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_compiled(dtype):
    check("cuda", dtype)
