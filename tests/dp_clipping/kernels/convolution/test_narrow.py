"""Depthwise convolutions: in Triton's interpreter here, compiled on a GPU."""

from math import prod

import pytest
import torch

pytest.importorskip("triton")

from dp_clipping.kernels.convolution.narrow import narrow_gradients
from tests.support.convolution_cases import NARROW, compiled, operands, run_in_the_interpreter


def check_narrow(device: str, dtype: torch.dtype, tf32: bool) -> None:
    for case in NARROW:
        x, y, right = operands(case, dtype, device)
        found = narrow_gradients(x, y, case[-1], case[0]).double()
        assert (found - right).abs().max() <= 1e-6 * right.abs().max() * prod(x.shape[2:])


def test_in_the_interpreter(interpreter):
    run_in_the_interpreter(interpreter, check_narrow, False)


@compiled
def test_compiled(dtype, tf32):
    check_narrow("cuda", dtype, tf32)
