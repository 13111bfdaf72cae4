"""Normal numbers in registers; without a GPU in Triton's interpreter."""

import math

import pytest
import torch

from dp_clipping.noise import gaussian as noise
from dp_clipping.noise import registers
from tests.support.one_noise import STREAMS

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _store_box_muller(p_words, p_out, BLOCK: tl.constexpr):
    """Of each word its radius and its angle's cosine and sine."""
    o_word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(p_words + o_word).to(tl.uint32)
    b_cos, b_sin = registers._cos_sin(words)
    tl.store(p_out + 3 * o_word, registers._radius(words))
    tl.store(p_out + 3 * o_word + 1, b_cos)
    tl.store(p_out + 3 * o_word + 2, b_sin)


def check_box_muller(device: str) -> None:
    """Against float64: where the quadrant or the exponent of u changes, at both ends, elsewhere."""
    block = 256
    near = torch.cat((torch.arange(-9, 10), 128 * torch.arange(-3, 4)))
    powers = 1 << torch.arange(34)
    edges = torch.cat((torch.arange(8) << 29, powers[:32], powers // 3))
    edges = (edges[:, None] + near).flatten()
    near_one = torch.tensor([0xFFFFFFFF, 0xFFFFFF80, 0xFFFFFF7F, 0xFFFFFF00, 0xFFFFFEFF])
    drawn = torch.stack(noise.philox(torch.arange(20_000), STREAMS[0])).flatten()
    words = torch.cat((edges % 2**32, near_one, drawn))
    words = words[: len(words) // block * block].to(device)
    out = torch.full((len(words), 3), torch.nan, device=device)
    _store_box_muller[(len(words) // block,)](words, out, BLOCK=block)
    radius, cos, sin = out.double().unbind(1)
    uniform = (words.float() * 2**-32 + 2**-33).double()
    angle = words.to(torch.int32).double() * (math.pi * 2**-31)
    assert (uniform == 1).any(), "no word was rounded to 1"
    assert out.isfinite().all()
    assert (radius - uniform.log().mul(-2).sqrt()).abs().max() < 1e-6
    assert (cos - angle.cos()).abs().max() < 9e-8
    assert (sin - angle.sin()).abs().max() < 9e-8


def test_in_the_interpreter(interpreter):
    interpreter.run(check_box_muller, "cpu")


@pytest.mark.gpu
def test_compiled():
    check_box_muller("cuda")
