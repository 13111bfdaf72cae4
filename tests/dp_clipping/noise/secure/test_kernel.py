"""The kernel of secure noise equals its reference to the last bit; in Triton's interpreter here."""

from itertools import product

import numpy as np
import pytest
import torch

from dp_clipping.distributed.placement import Span, spans_of
from dp_clipping.noise.secure import kernel as kernels
from dp_clipping.noise.secure import rounded_gaussian as reference
from dp_clipping.noise.secure.source import add_plain
from dp_clipping.sampling.words import blocks
from tests.dp_clipping.noise.secure.test_rounded_gaussian import words

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

KEYS = [bytes(range(32)), bytes(32), b"\xff" * 32]
FUSED = not kernels.INTERPRETED
PLACES = {
    "whole": None,
    "nothing": (),
    "from 16 on": (Span(0, 16, 70, 70, 1),),
    "from 21 on": (Span(0, 21, 70, 70, 1),),
    "far": (Span(0, 2**34 - 5, 70, 70, 1),),
    "columns": spans_of(((0, 9), (5, 7)), (9, 23)),
    "columns of 16": spans_of(((0, 5), (16, 16)), (5, 64)),
    "a box": spans_of(((1, 2), (2, 3), (3, 5)), (4, 6, 9)),
}


@triton.jit
def _store_blocks(p_out, p_row, p_counters, BLOCK: tl.constexpr):
    k0, k1 = kernels._word(p_row, 0)
    k2, k3 = kernels._word(p_row, 1)
    k4, k5 = kernels._word(p_row, 2)
    k6, k7 = kernels._word(p_row, 3)
    o = tl.arange(0, BLOCK)
    x = kernels._chacha(tl.load(p_counters + o), k0, k1, k2, k3, k4, k5, k6, k7)
    for i in tl.static_range(16):
        tl.store(p_out + i * BLOCK + o, x[i].to(tl.int64))


def check_words(device: str) -> None:
    """ChaCha20's words, for counters of 64 bits."""
    counters = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**62, 3 * 2**60])
    for key in KEYS:
        row = torch.from_numpy(np.frombuffer(key, "<i8").copy()).to(device)
        out = torch.empty(16, len(counters), dtype=torch.int64, device=device)
        _store_blocks[(1,)](out, row, counters.to(device), BLOCK=len(counters))
        expected = blocks(key, counters.numpy().astype(np.uint64))
        assert (out.cpu().numpy() == expected).all()


@triton.jit
def _store_parts(p_words, p_out, n, FUSED: tl.constexpr, BLOCK: tl.constexpr):
    """Of each six words: radius, cosine and sine, two parts each."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0, w1 = tl.load(p_words + o).to(tl.uint32), tl.load(p_words + n + o).to(tl.uint32)
    w2, w3 = tl.load(p_words + 2 * n + o).to(tl.uint32), tl.load(p_words + 3 * n + o).to(tl.uint32)
    w4, w5 = tl.load(p_words + 4 * n + o).to(tl.uint32), tl.load(p_words + 5 * n + o).to(tl.uint32)
    rh, rl = kernels._radius(w0, w1, w2, w3, FUSED)
    ch, cl, sh, sl = kernels._cos_sin(w4, w5, FUSED)
    tl.store(p_out + o, rh)
    tl.store(p_out + n + o, rl)
    tl.store(p_out + 2 * n + o, ch)
    tl.store(p_out + 3 * n + o, cl)
    tl.store(p_out + 4 * n + o, sh)
    tl.store(p_out + 5 * n + o, sl)


def check_parts(device: str) -> None:
    """Radius, cosine and sine, at the words where a formula changes and elsewhere."""
    w = words(5120)
    n = w.shape[1]
    given = torch.from_numpy(w.astype(np.int64)).to(device)
    out = torch.empty(6, n, dtype=torch.float64, device=device)
    _store_parts[(n // 512,)](given, out, n, FUSED, BLOCK=512, enable_fp_fusion=False)
    (c, s) = reference.cos_sin(w[4], w[5])
    for found, expected in zip(out.cpu(), (*reference.radius(*w[:4]), *c, *s), strict=True):
        assert torch.equal(found, torch.from_numpy(expected))


def check_places(device: str) -> None:
    """Every place of a part, every output dtype; nothing is written outside."""
    sums = torch.linspace(-30, 30, 5000)
    on_gpu = product(PLACES, (torch.float32, torch.float16, torch.bfloat16))
    in_interpreter = [*product(PLACES, (torch.float32,)), ("from 21 on", torch.float16)]
    for name, dtype in on_gpu if device != "cpu" else in_interpreter:
        place = PLACES[name]
        n = 2500 if place is None else sum(run.numel for run in place)
        total = sums[:n].to(device)
        guard = torch.full((n + 40,), torch.nan, dtype=dtype, device=device)
        kernels.add_integers_kernel_launch(
            [total], [guard[20 : n + 20]], [KEYS[0]], [place], 2.0**-20, 3e6, 7.0
        )
        expected = torch.empty(n, dtype=dtype)
        add_plain(total.cpu(), expected, KEYS[0], place, 2.0**-20, 3e6, 7.0)
        assert torch.equal(guard[20 : n + 20].cpu(), expected), (name, dtype)
        assert guard[:20].isnan().all()
        assert guard[n + 20 :].isnan().all(), "written behind its end"


def check_many(device: str) -> None:
    """Many tensors in one launch, in place; sums beyond the limit, infinite and not a number."""
    program = reference.GROUP * kernels.BLOCK
    sizes = [1, 0, 15, 16, 17, program * kernels.LOOPS + 5]
    totals = [torch.linspace(-2, 2, n) * 10.0 ** (i % 3) for i, n in enumerate(sizes)]
    totals[4][:5] = torch.tensor([3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    keys = [bytes([i]) * 32 for i in range(len(sizes))]
    places = [None] * len(sizes)
    expected = [torch.empty_like(t) for t in totals]
    for total, out, key in zip(totals, expected, keys, strict=True):
        add_plain(total, out, key, None, 2.0**-12, 5000.5, 64.0)
    found = [t.to(device) for t in totals]
    kernels.add_integers_kernel_launch(found, found, keys, places, 2.0**-12, 5000.5, 64.0)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu().nan_to_num(7, posinf=8, neginf=9), b.nan_to_num(7, 8, 9))


CHECKS = (check_words, check_parts, check_places, check_many)


@pytest.mark.parametrize("body", CHECKS, ids=lambda body: body.__name__)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(body, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("body", CHECKS, ids=lambda body: body.__name__)
def test_compiled_kernel(body):
    body("cuda")
