"""Sums under random signs: in the interpreter here, compiled on a GPU."""

import pytest
import torch

from dp_clipping.kernels.signed_sums import PIECE, SIGNS, signed_sums, signed_sums_plain


def check(device: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for size, length in ((3, 5), (2, PIECE), (2, 3 * PIECE + 17)):
        rows = torch.randn(size, length + 1, generator=draw).to(device, dtype)[:, 1:]
        expected = signed_sums_plain(rows.double())
        torch.testing.assert_close(signed_sums(rows).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter(interpreter, dtype):
    interpreter.run(check, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_compiled(dtype):
    check("cuda", dtype)


def test_each_number_has_signs_of_its_own():
    """One by one: 1 or -1, about as many of both, and no sign goes with another."""
    ones = torch.zeros(129, 3 * PIECE, dtype=torch.float64)
    ones[torch.arange(129), torch.arange(129) * 95] = 1
    signs = signed_sums_plain(ones)[:, :SIGNS]
    assert (signs.abs() == 1).all()
    assert (signs.t() @ signs / 129 - torch.eye(SIGNS)).abs().max() < 0.4
    assert signs.mean(0).abs().max() < 0.4


def test_the_norm_is_last():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert signed_sums_plain(rows)[:, SIGNS].tolist() == [5.0, 0.0]
