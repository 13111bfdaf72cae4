"""Noise drawn in registers: the fused twin of `dp_clipping.noise.add_noise`.

Traffic: n float32 values are read once and n of the output's dtype written, nothing else. Drawing
with `torch.randn` and adding would write and read the noise too, and could not draw a slice alone.
On an H200 (torch 2.11, Triton 3.6) 2²⁸ values took 0.8 ms, limited by the drawing; `randn_like`,
add, divide and copy in float32 took 2.35 ms.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the plain twin serves
    triton = None

if TYPE_CHECKING:
    from dp_clipping.noise import NoiseStream

BLOCK = 256  # counters of one program; each gives four values
LOOPS = 16  # blocks of one program where many tensors share a launch
ROW_WORDS = 6  # address of the sum, of the result, size, seed, two counter words


def serves(total: Tensor) -> bool:
    """Whether this kernel, and not its plain twin, adds the noise to `total`."""
    return triton is not None and total.is_cuda and total.dtype == torch.float32


def add_noise_kernel_launch(
    total: Tensor, out: Tensor, stream: NoiseStream, std: float, divisor: float, offset: int
) -> None:
    """`out ← (total + std·z) / divisor`, cast last; `std` 0 draws nothing.

    Args:
        total: [n], float32, contiguous.
        out: [n], any floating dtype, contiguous; may be `total` itself.
        offset: the element of the stream that `total[0]` gets, at least 0.
    """
    n = total.numel()
    if n == 0:
        return
    first, shift = divmod(offset, 4)
    _add_noise_kernel[(triton.cdiv(shift + n, 4 * BLOCK),)](
        total, out, n, first, shift,
        _signed(stream.key_0 | stream.key_1 << 32, 64),
        _signed(stream.counter_2, 32), _signed(stream.counter_3, 32),
        float(std), float(divisor), DRAW=std != 0, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def add_noise_to_all_kernel_launch(
    totals: list[Tensor], outs: list[Tensor], streams: list[NoiseStream], std: float, divisor: float
) -> None:
    """`add_noise_kernel_launch` for many tensors at once, each from the start of its stream.

    A network has hundreds of parameters, most of them small: one launch each would keep the GPU
    waiting for the host. Programs find their tensor by a table of addresses.

    Args:
        totals: of any sizes, float32, contiguous, on one device.
        outs: of one dtype, contiguous; each may be its total itself.
    """
    pieces = _pieces(tuple(total.numel() for total in totals), totals[0].device)
    if not len(pieces):
        return
    rows = [
        (
            total.data_ptr(), out.data_ptr(), total.numel(),
            _signed(stream.key_0 | stream.key_1 << 32, 64), stream.counter_2, stream.counter_3,
        )
        for total, out, stream in zip(totals, outs, streams, strict=True)
    ]  # fmt: skip
    table = torch.tensor(rows, dtype=torch.int64).to(totals[0].device, non_blocking=True)
    _add_noise_to_all_kernel[(len(pieces),)](
        table, pieces, float(std), float(divisor), DTYPE=TRITON_DTYPES[outs[0].dtype],
        ROW_WORDS=ROW_WORDS, LOOPS=LOOPS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Which tensor and which piece of it each program draws: [programs, 2] int64."""
    counts = [-(-n // (4 * BLOCK * LOOPS)) for n in sizes]
    pairs = [
        torch.stack((torch.full((c,), i), torch.arange(c)), dim=1) for i, c in enumerate(counts)
    ]
    return torch.cat(pairs).to(device)


def _signed(word: int, bits: int) -> int:
    """Triton types an argument by its value: without a sign bit its type, and with it the compiled
    kernel, would depend on the key."""
    return word - (1 << bits) if word >> (bits - 1) else word


if triton is not None:
    TRITON_DTYPES = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }

    @triton.jit
    def _words(first, seed, c2, c3, BLOCK: tl.constexpr):
        """The four words [BLOCK] uint32 of this program's counters, which start at `first`."""
        return _words_at(first + tl.program_id(0).to(tl.int64) * BLOCK, seed, c2, c3, BLOCK)

    @triton.jit
    def _words_at(first, seed, c2, c3, BLOCK: tl.constexpr):
        """The four words [BLOCK] uint32 of the counters from `first` on."""
        o_counter = first + tl.arange(0, BLOCK)
        low, high = o_counter.to(tl.uint32), (o_counter >> 32).to(tl.uint32)
        return tl.philox(seed, low, high, c2, c3)

    @triton.jit
    def _normals(w_radius, w_angle):
        """Box-Muller on two words [BLOCK]; the constants are those of the plain twin."""
        b_uniform = w_radius.to(tl.float32) * 2.0**-32 + 2.0**-33
        b_radius = tl.sqrt_rn(-2.0 * tl.log(b_uniform))
        b_angle = w_angle.to(tl.int32, bitcast=True).to(tl.float32) * (3.141592653589793 * 2.0**-31)
        return b_radius * tl.cos(b_angle), b_radius * tl.sin(b_angle)

    @triton.jit
    def _normals_of(w0, w1, w2, w3, BLOCK: tl.constexpr):
        """Four values a counter, z0 z1 z2 z3 of one next to each other: [4·BLOCK]."""
        z0, z1 = _normals(w0, w1)
        z2, z3 = _normals(w2, w3)
        return tl.join(tl.join(z0, z2), tl.join(z1, z3)).reshape(4 * BLOCK)

    # The key and the counter change with every step: no compiled variant may depend on them.
    @triton.jit(do_not_specialize=["first", "seed", "c2", "c3"])
    def _add_noise_kernel(
        p_total, p_out, n, first, shift, seed, c2, c3, std, divisor,
        DRAW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        o_n = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK) - shift
        m_n = (o_n >= 0) & (o_n < n)
        b_sum = tl.load(p_total + o_n, mask=m_n, other=0)
        if DRAW:
            w0, w1, w2, w3 = _words(first, seed, c2, c3, BLOCK)
            b_sum += std * _normals_of(w0, w1, w2, w3, BLOCK)
        tl.store(p_out + o_n, tl.div_rn(b_sum, divisor).to(p_out.dtype.element_ty), mask=m_n)

    @triton.jit
    def _add_noise_to_all_kernel(
        p_rows, p_pieces, std, divisor, DTYPE: tl.constexpr, ROW_WORDS: tl.constexpr,
        LOOPS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_row = tl.load(p_pieces + 2 * tl.program_id(0))
        i_piece = tl.load(p_pieces + 2 * tl.program_id(0) + 1)
        p_row = p_rows + ROW_WORDS * i_row
        p_total = tl.load(p_row).to(tl.pointer_type(tl.float32))
        p_out = tl.load(p_row + 1).to(tl.pointer_type(DTYPE))
        n, seed = tl.load(p_row + 2), tl.load(p_row + 3)
        c2, c3 = tl.load(p_row + 4).to(tl.int32), tl.load(p_row + 5).to(tl.int32)
        for i_loop in range(LOOPS):
            first = (i_piece * LOOPS + i_loop) * BLOCK
            o_n = 4 * first + tl.arange(0, 4 * BLOCK)
            m_n = o_n < n
            b_sum = tl.load(p_total + o_n, mask=m_n, other=0)
            w0, w1, w2, w3 = _words_at(first, seed, c2, c3, BLOCK)
            b_sum += std * _normals_of(w0, w1, w2, w3, BLOCK)
            tl.store(p_out + o_n, tl.div_rn(b_sum, divisor).to(DTYPE), mask=m_n)
