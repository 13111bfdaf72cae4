"""Words and normal numbers in registers; without a GPU in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch

from dp_clipping.noise import gaussian as noise
from dp_clipping.noise import registers
from tests.support.one_noise import STREAMS

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit(do_not_specialize=["first", "seed", "c2", "c3"])
def _store_words(p_out, first, seed, c2, c3, BLOCK: tl.constexpr):
    o_counter = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = registers._words_of(o_counter, seed, c2, c3)
    o_row = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o_row, w0.to(tl.int64))
    tl.store(p_out + o_row + BLOCK, w1.to(tl.int64))
    tl.store(p_out + o_row + 2 * BLOCK, w2.to(tl.int64))
    tl.store(p_out + o_row + 3 * BLOCK, w3.to(tl.int64))


def check_words(device: str) -> None:
    """The integers are equal, to the last bit."""
    programs, block = 2, 64
    for stream in STREAMS:
        for first in [0, 5, 2**32 - 70, 2**61]:
            words = torch.empty(programs, 4, block, dtype=torch.int64, device=device)
            key = np.uint64(stream.key_0 | stream.key_1 << 32).view(np.int64)
            high = np.uint32([stream.counter_2, stream.counter_3]).view(np.int32)
            _store_words[(programs,)](words, first, int(key), *high.tolist(), BLOCK=block)
            expected = noise.philox(torch.arange(first, first + programs * block), stream)
            got = words.cpu().transpose(0, 1).reshape(4, -1)
            assert torch.equal(got, torch.stack(expected)), (stream, first)


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


BODIES = [check_words, check_box_muller]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(body, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_compiled(body):
    body("cuda")
