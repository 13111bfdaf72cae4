"""Compares the kernel that keeps writes to gathered values with its reference implementation.

Without a GPU the kernel runs in Triton's interpreter. bfloat16 is not tried there.
"""

import pytest
import torch

from ddp.internals import kernels

SIZES = [0, 1, 4096, 2 * 4096 + 5]


def check(pairs: list[tuple[torch.dtype, torch.dtype]], device: str) -> None:
    for own_dtype, shard_dtype in pairs:
        for n in SIZES:
            compare(n, own_dtype, shard_dtype, device)


def compare(n: int, own_dtype: torch.dtype, shard_dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(n)
    guard = torch.full((n + 8,), torch.nan, dtype=shard_dtype, device=device)
    shard = guard[:n]
    shard.copy_(torch.randn(n, generator=generator))
    own = shard.to(own_dtype, copy=True)
    own[::3] += 1
    own[1::300] = torch.nan
    own[2::300] = torch.inf
    expected = shard.clone()
    is_other = own != shard.to(own_dtype)
    by_definition = torch.where(is_other, own.to(shard_dtype), shard)
    kernels.take_written_plain(own, expected)
    kernels.take_written_kernel_launch(own, shard)
    for found in (expected, shard):
        torch.testing.assert_close(found, by_definition, rtol=0, atol=0, equal_nan=True)
    assert guard[n:].isnan().all(), "written behind its end"


def interpreted() -> None:
    check([(torch.float32, torch.float32), (torch.float16, torch.float32)], "cpu")
    check([(torch.float64, torch.float64)], "cpu")


def test_kernel_in_the_interpreter(interpreter):
    interpreter.run(interpreted)


@pytest.mark.gpu
def test_compiled_kernel():
    wide = torch.float32
    pairs = [(dtype, wide) for dtype in (torch.bfloat16, torch.float16, wide)]
    check([*pairs, (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)], "cuda")
