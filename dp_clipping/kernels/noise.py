"""Noise drawn in registers: the fused twin of `dp_clipping.noise.add_noise`.

Traffic: n float32 values are read once and n of the output's dtype written, nothing else. Drawing
with `torch.randn` and adding would write and read the noise too, and could not draw a slice alone.
On an H200 (torch 2.11, Triton 3.6) 2²⁸ values took 0.8 ms, limited by the drawing; `randn_like`,
add, divide and copy in float32 took 2.35 ms.
"""

from __future__ import annotations

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


def _signed(word: int, bits: int) -> int:
    """Triton types an argument by its value: without a sign bit its type, and with it the compiled
    kernel, would depend on the key."""
    return word - (1 << bits) if word >> (bits - 1) else word


if triton is not None:

    @triton.jit
    def _words(first, seed, c2, c3, BLOCK: tl.constexpr):
        """The four words [BLOCK] uint32 of this program's counters, which start at `first`."""
        o_counter = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        low, high = o_counter.to(tl.uint32), (o_counter >> 32).to(tl.uint32)
        return tl.philox(seed, low, high, c2, c3)

    @triton.jit
    def _normals(w_radius, w_angle):
        """Box-Muller on two words [BLOCK]; the constants are those of the plain twin."""
        b_uniform = w_radius.to(tl.float32) * 2.0**-32 + 2.0**-33
        b_radius = tl.sqrt_rn(-2.0 * tl.log(b_uniform))
        b_angle = w_angle.to(tl.int32, bitcast=True).to(tl.float32) * (3.141592653589793 * 2.0**-31)
        return b_radius * tl.cos(b_angle), b_radius * tl.sin(b_angle)

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
            z0, z1 = _normals(w0, w1)
            z2, z3 = _normals(w2, w3)
            # [BLOCK, 2, 2] → [4·BLOCK], z0 z1 z2 z3 of one counter next to each other
            b_z = tl.join(tl.join(z0, z2), tl.join(z1, z3)).reshape(4 * BLOCK)
            b_sum += std * b_z
        tl.store(p_out + o_n, tl.div_rn(b_sum, divisor).to(p_out.dtype.element_ty), mask=m_n)
