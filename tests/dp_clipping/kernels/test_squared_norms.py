"""Squared norms of per-sample gradients, against the reference implementation in float64."""

import pytest
import torch

pytest.importorskip("triton")

from dp_clipping.kernels.launch.tiles import Tile
from dp_clipping.kernels.squared_norms import BLOCK, squared_norms, squared_norms_plain
from tests.support.kernel_cases import on_gpu


def check_squares(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    torch.manual_seed(0)
    for shape in [(3, 1), (1, BLOCK), (2, BLOCK + 1), (4, 3, 50), (0, 5), (2, 0)]:
        g = torch.randn(shape).to(device, dtype)
        torch.testing.assert_close(squared_norms(g), squared_norms_plain(g), rtol=2e-6, atol=0)
    g = torch.randn(6, 4).to(device, dtype).t()
    torch.testing.assert_close(squared_norms(g), squared_norms_plain(g), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter(interpreter, dtype):
    interpreter.run(check_squares, "cpu", dtype, Tile(32, 32, 32, 4, 2))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled(dtype):
    check_squares("cuda", dtype, None)
