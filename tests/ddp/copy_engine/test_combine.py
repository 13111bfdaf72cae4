"""The sum of pulled chunks: the Triton kernel against its reference implementation.

Without a GPU the kernel runs in Triton's interpreter. bfloat16 is not tried there.
"""

import pytest
import torch

from ddp.internals import kernels

SIZES = [0, 1, 127, 4096, 4097, 3 * 4096 + 5]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}


def check(sizes: list[int], dtypes: list[torch.dtype], rows_and_scales, device: str) -> None:
    for dtype in dtypes:
        for n in sizes:
            for rows, scale in rows_and_scales:
                compare(n, rows, scale, dtype, device)


def compare(n: int, rows: int, scale: float, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(n + rows)
    everything = torch.randn(n + rows * (n + 3) + 8, generator=generator).to(device, dtype)
    guard = everything.new_full((n + 8,), torch.nan)
    mine, pulled = guard[:n], everything[n : n + rows * (n + 3)].view(rows, n + 3)[:, :n]
    mine.copy_(everything[:n])
    expected = mine.clone()
    exact = (mine.double() + pulled.double().sum(0)) * scale
    kernels.combine_plain(expected, pulled, scale)
    kernels.combine_kernel_launch(mine, pulled, scale)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(mine, expected, **close)
    torch.testing.assert_close(mine.double(), exact, **close)
    assert guard[n:].isnan().all(), "written behind its end"


def interpreted() -> None:
    kinds = [torch.float32, torch.float16]
    check(SIZES, kinds, [(1, 0.5), (3, 0.25), (2, 1.0), (0, 1.0)], "cpu")
    check([300], [torch.float64], [(3, 0.25)], "cpu")
    check([5 * 4096 + 1], [torch.float32], [(3, 0.25)], "cpu")


def test_kernel_in_the_interpreter(interpreter):
    interpreter.run(interpreted)


@pytest.mark.gpu
def test_compiled_kernel():
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    check([*SIZES, 1_000_003], kinds, [(1, 0.5), (3, 0.25), (7, 1.0)], "cuda")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_reference_sums_in_float32_or_wider(dtype):
    """Sixteen-bit values are rounded once: 2048 + 1 + 1 is 2050, not 2048."""
    mine, pulled = torch.tensor([2048.0], dtype=dtype), torch.ones(2, 1, dtype=dtype)
    kernels.combine(mine, pulled, 1.0)
    assert mine.item() == torch.tensor(2050.0, dtype=dtype).item()
