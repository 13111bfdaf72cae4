"""Operands with the channels last: in Triton's interpreter here, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dp_clipping.kernels.convolution.packing import pack, scale_of
from tests.support.convolution_cases import compiled, run_in_the_interpreter

PADDING = (2, 1, 3)


def check_places(device: str, dtype: torch.dtype, tf32: bool) -> None:
    """Any layout that is given comes out channels last, with zeros around it."""
    x = torch.randn(2, 5, 2, 3, 4).to(device, dtype)
    layouts = [x, x.to(memory_format=torch.channels_last_3d), x.mT.contiguous().mT]
    for padding in ((0, 0, 0), PADDING):
        expected = F.pad(x, [p for p in reversed(padding) for _ in (0, 1)]).movedim(1, -1)
        for given in layouts:
            packed = pack(given, 2, tf32, padding)
            assert packed.values.is_contiguous()
            back = packed.values.double()
            if packed.largest is not None:
                back *= scale_of(packed.largest).double().view(2, 1, 1, 1, 1)
            bound = 0 if packed.largest is None else 2.0**-11
            assert ((back - expected.double()).abs() <= bound * expected.double().abs()).all()


def check_digits(device: str, dtype: torch.dtype, tf32: bool) -> None:
    """Each sample keeps its digits, however small or large the others are."""
    if dtype != torch.float32 or not tf32:
        return
    scales = torch.tensor([1e-30, 1.0, 1e30]).view(3, 1, 1, 1, 1)
    x = (torch.randn(3, 2, 1, 3, 5) * scales).to(device)
    packed = pack(x, 3, True)
    assert packed.values.dtype == torch.float16
    factors = scale_of(packed.largest).double().view(3, 1, 1, 1, 1)
    back = packed.values.double().movedim(-1, 1) * factors
    assert ((back - x.double()).abs() <= 2.0**-11 * x.double().abs()).all()


BODIES = [check_places, check_digits]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_in_the_interpreter(interpreter, body, tf32):
    run_in_the_interpreter(interpreter, body, tf32)


@compiled
@pytest.mark.parametrize("body", BODIES)
def test_compiled(body, dtype, tf32):
    body("cuda", dtype, tf32 and dtype == torch.float32)


def test_what_lies_right_is_not_copied():
    x = torch.randn(2, 5, 1, 3, 4).to(memory_format=torch.channels_last_3d)
    assert pack(x, 2, False).values.data_ptr() == x.data_ptr()
