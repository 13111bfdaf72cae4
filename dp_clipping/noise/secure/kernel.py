"""ChaCha20, integers of a rounded Gaussian, sum and division in one Triton kernel.

The counterpart of `rounded_gaussian` and `source.add_plain`, equal to them to the last bit: the
compiler contracts no product with a sum (`enable_fp_fusion=False`). No branch depends on a secret.
Traffic: n float32 values are read once and n of the output's dtype written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.kernels.launch.tiles import (
    INTERPRETED,
    ceil_div,
    launch,
    table_on,
    triton,
)
from dp_clipping.noise.kernel import pieces_of, run_row
from dp_clipping.noise.secure import rounded_gaussian as reference

if triton is not None:
    import triton.language as tl

GROUP = reference.GROUP
BLOCK = 128  # groups of one program; each gives 16 values
LOOPS = 1  # blocks of one program: with 4 it takes 5 % longer, without the loop 20 %
RUN_WORDS = 12
GROUPS = 7  # which of them counts a run's groups


def add_integers_kernel_launch(
    totals: list[Tensor], outs: list[Tensor], keys: list[bytes], places: Sequence[Place | None],
    grid: float, scale: float, divisor: float,
) -> None:  # fmt: skip
    """Launches `out ← (round(total / grid) + integer) · (grid / divisor)`, cast last.

    Each run of a part is a row of the table. Programs number its groups row by row of the run:
    group j of row q holds values from 16(⌊(offset + q·stride) / 16⌋ + j) on.

    Args:
        totals: float32, contiguous, on one device.
        outs: tensors of one dtype, contiguous; each may be its total itself.
        keys: of ChaCha20, of each total's parameter.
        places: where each total lies in its parameter; None: it is the whole.
        scale: the standard deviation of the integers.
    """
    device = totals[0].device
    # As bits of float64: a launch would pass float32.
    scales = table_on(device, np.array([1 / grid, scale, grid / divisor]).view("<i8").tolist())
    for has_rows in (False, True):
        rows = [
            row
            for total, out, key, place in zip(totals, outs, keys, places, strict=True)
            for row in _runs_of(total, out, key, place, has_rows)
        ]
        groups = tuple(row[GROUPS] for row in rows)
        if not any(groups):
            continue
        pieces = pieces_of(groups, device, BLOCK * LOOPS)
        table = table_on(device, chain.from_iterable(rows))
        launch(
            _add_integers_kernel, (len(pieces),), (table, pieces, scales),
            DTYPE=outs[0].dtype, HAS_ROWS=has_rows, FUSED=not INTERPRETED, RUN_WORDS=RUN_WORDS,
            LOOPS=LOOPS, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _runs_of(
    total: Tensor, out: Tensor, key: bytes, place: Place | None, has_rows: bool
) -> list[list[int]]:
    """Returns the table's rows of a total's runs with several rows, or of those with one."""
    n, found = total.numel(), []
    for run in (Span(0, 0, n, n, 1),) if place is None else place:
        if (run.count > 1) != has_rows:
            continue
        is_aligned = run.offset % GROUP == 0 and (not has_rows or run.stride % GROUP == 0)
        width = ceil_div(run.length + (0 if is_aligned else GROUP - 1), GROUP)
        found.append(run_row(total, out, run, width, np.frombuffer(key, dtype="<i8").tolist()))
    return found


if triton is not None:

    @triton.jit
    def _rotated(x, BITS: tl.constexpr):
        return (x << BITS) | (x >> (32 - BITS))

    @triton.jit
    def _sum(a, b):
        return tl.add(a, b, sanitize_overflow=False)  # wraps

    @triton.jit
    def _quarter_round(a, b, c, d):
        a = _sum(a, b)
        d = _rotated(d ^ a, 16)
        c = _sum(c, d)
        b = _rotated(b ^ c, 12)
        a = _sum(a, b)
        d = _rotated(d ^ a, 8)
        c = _sum(c, d)
        b = _rotated(b ^ c, 7)
        return a, b, c, d

    @triton.jit
    def _chacha(o_counter, k0, k1, k2, k3, k4, k5, k6, k7):
        """Returns the 16 words of the blocks of int64 counters; key words are uint32 alike."""
        zero = o_counter.to(tl.uint32) * 0
        n0, n1 = o_counter.to(tl.uint32), (o_counter >> 32).to(tl.uint32)
        x0, x1 = zero + 0x61707865, zero + 0x3320646E
        x2, x3 = zero + 0x79622D32, zero + 0x6B206574
        x4, x5, x6, x7 = zero + k0, zero + k1, zero + k2, zero + k3
        x8, x9, x10, x11 = zero + k4, zero + k5, zero + k6, zero + k7
        x12, x13, x14, x15 = n0, n1, zero, zero
        for _ in range(10):
            x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
            x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
            x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
            x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
            x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
            x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
            x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
            x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
        return (
            _sum(x0, 0x61707865), _sum(x1, 0x3320646E), _sum(x2, 0x79622D32), _sum(x3, 0x6B206574),
            _sum(x4, k0), _sum(x5, k1), _sum(x6, k2), _sum(x7, k3),
            _sum(x8, k4), _sum(x9, k5), _sum(x10, k6), _sum(x11, k7),
            _sum(x12, n0), _sum(x13, n1), x14, x15,
        )  # fmt: skip

    @triton.jit
    def _two_prod(a, b, FUSED: tl.constexpr):
        p = a * b
        if FUSED:
            e = tl.fma(a, b, -p)
        else:  # the interpreter rounds the product of a fused multiply-add
            c, d = 134217729.0 * a, 134217729.0 * b
            ah, bh = c - (c - a), d - (d - b)
            al, bl = a - ah, b - bh
            e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
        return p, e

    @triton.jit
    def _fast_two_sum(a, b):
        s = a + b
        return s, b - (s - a)

    @triton.jit
    def _rounded(x):
        return (x + 6755399441055744.0) - 6755399441055744.0

    @triton.jit
    def _placed(w, START: tl.constexpr, minus):
        """Returns START + 2⁻⁵²·START·w − minus, exact in all uses; START is a power of two.

        The word becomes the low bits of START, which takes no conversion.
        """
        start = tl.full(w.shape, START, tl.float64).to(tl.uint64, bitcast=True)
        return (start | w.to(tl.uint64)).to(tl.float64, bitcast=True) - minus

    @triton.jit
    def _radius(w0, w1, w2, w3, FUSED: tl.constexpr):
        s, e = _fast_two_sum(
            _placed(w0, 2.0**20, 2.0**20),  # w0·2⁻³²
            _placed(w1, 2.0**-12, 2.0**-12),  # w1·2⁻⁶⁴
        )
        t, f = _fast_two_sum(
            _placed(w2, 2.0**-44, 2.0**-44),  # w2·2⁻⁹⁶
            _placed(w3, 2.0**-76, 2.0**-76 - 2.0**-129),  # (w3 + ½)·2⁻¹²⁸
        )
        a = e + t
        v = a - e
        b = (e - (a - v)) + (t - v)
        u, c = _fast_two_sum(s, a)
        rest = c + (b + f)
        bits = u.to(tl.int64, bitcast=True)
        exponent = (bits - 0x3FE5555555555556) & -0x10000000000000
        m = (bits - exponent).to(tl.float64, bitcast=True)
        # The exponent, a small integer, in the low bits of 1.5 · 2⁵².
        halvings = (0x4338000000000000 - (exponent >> 52)).to(tl.float64, bitcast=True)
        halvings -= 6755399441055744.0
        power = (0x3FF0000000000000 - exponent).to(tl.float64, bitcast=True)
        fh, fl = _fast_two_sum(m - 1.0, rest * power)
        bh = 2.0 + fh
        bl = (fh - (bh - 2.0)) + fl
        x = 0.5 * fh
        y = 0.5 - 0.5 * (x * (1.0 - x * (1.0 - x)))
        y = y + y * (1.0 - bh * y)
        y = y + y * (1.0 - bh * y)
        q = fh * y
        p, e = _two_prod(q, bh, FUSED)
        zh, zl = _fast_two_sum(q, (((fh - p) - e) + (fl - q * bl)) * y)
        p, e = _two_prod(zh, zh, FUSED)
        wh, wl = _fast_two_sum(p, e + 2.0 * zh * zl)
        t = 0.037037037037037035 * wh + 0.04
        t = t * wh + 0.043478260869565216
        t = t * wh + 0.047619047619047616
        t = t * wh + 0.05263157894736842
        t = t * wh + 0.058823529411764705
        t = t * wh + 0.06666666666666667
        t = t * wh + 0.07692307692307693
        t = t * wh + 0.09090909090909091
        t = t * wh + 0.1111111111111111
        t = t * wh + 0.14285714285714285
        t = t * wh + 0.2
        p, e = _two_prod(wh, t, FUSED)
        sh = 0.3333333333333333 + p
        c = p - (sh - 0.3333333333333333)
        sl = c + ((e + wl * t) + 1.850371707708594e-17)
        p, e = _two_prod(wh, sh, FUSED)
        e = e + (wh * sl + wl * sh)
        p2, e2 = _two_prod(zh, p, FUSED)
        h, c = _fast_two_sum(zh, p2)
        rest = c + ((e2 + (zh * e + zl * p)) + zl)
        h, c = _fast_two_sum(halvings * 0.6931471805592082, -2.0 * h)
        h, rest = _fast_two_sum(
            2.0 * h, 2.0 * (c + (halvings * 7.371002565167799e-13 - 2.0 * rest))
        )
        y = (0x5FE6EB50C7B537A9 - (h.to(tl.int64, bitcast=True) >> 1)).to(tl.float64, bitcast=True)
        half = 0.5 * h
        y = y * (1.5 - (half * y) * y)
        y = y * (1.5 - (half * y) * y)
        y = y * (1.5 - (half * y) * y)
        r = h * y
        p, e = _two_prod(r, r, FUSED)
        return r, (((h - p) - e) + rest) * (0.5 * y)

    @triton.jit
    def _cos_sin(w0, w1, FUSED: tl.constexpr):
        th, tl_ = _fast_two_sum(
            _placed((w0 << 2) ^ 0x80000000, 2.0**18, 2.0**18 + 2.0**-3),  # signed, times 2⁻³⁴
            _placed(w1, 2.0**-12, 2.0**-12 - 2.0**-65),  # (w1 + ½)·2⁻⁶⁴
        )
        p, e = _two_prod(th, th * 0 + 6.283185307179586, FUSED)
        ph, pl = _fast_two_sum(p, e + (th * 2.4492935982947064e-16 + tl_ * 6.283185307179586))
        p, e = _two_prod(ph, ph, FUSED)
        wh, wl = _fast_two_sum(p, e + 2.0 * ph * pl)
        # v of the sine
        t = -8.22063524662433e-18 * wh + 2.8114572543455206e-15
        t = t * wh + -7.647163731819816e-13
        t = t * wh + 1.6059043836821613e-10
        t = t * wh + -2.505210838544172e-08
        t = t * wh + 2.7557319223985893e-06
        t = wh * (t * wh + -0.0001984126984126984)
        h = 0.008333333333333333 + t
        c = t - (h - 0.008333333333333333)
        low = c + 1.1564823173178714e-19
        p, e = _two_prod(wh, h, FUSED)
        e = e + (wh * low + wl * h)
        h = -0.16666666666666666 + p
        c = p - (h + 0.16666666666666666)
        low = c + (e + -9.25185853854297e-18)
        vh, vl = _two_prod(wh, h, FUSED)
        vl = vl + (wh * low + wl * h)
        p, e = _two_prod(ph, vh, FUSED)
        sh, c = _fast_two_sum(ph, p)
        sl = c + ((e + (ph * vl + pl * vh)) + pl)
        # v of the cosine
        t = 4.110317623312165e-19 * wh + -1.5619206968586225e-16
        t = t * wh + 4.779477332387385e-14
        t = t * wh + -1.1470745597729725e-11
        t = t * wh + 2.08767569878681e-09
        t = t * wh + -2.755731922398589e-07
        t = wh * (t * wh + 2.48015873015873e-05)
        h = -0.001388888888888889 + t
        c = t - (h + 0.001388888888888889)
        low = c + 5.300543954373577e-20
        p, e = _two_prod(wh, h, FUSED)
        e = e + (wh * low + wl * h)
        h = 0.041666666666666664 + p
        c = p - (h - 0.041666666666666664)
        low = c + (e + 2.3129646346357427e-18)
        vh, vl = _two_prod(wh, h, FUSED)
        vl = vl + (wh * low + wl * h)
        gh = -0.5 + vh
        gl = (vh - (gh + 0.5)) + vl
        p, e = _two_prod(wh, gh, FUSED)
        ch = 1.0 + p
        cl = (p - (ch - 1.0)) + (e + (wh * gl + wl * gh))
        quarter = _sum(w0, 1 << 29) >> 30
        m_odd = (quarter & 1) != 0
        m_cos, m_sin = ((quarter + 1) & 2) != 0, (quarter & 2) != 0
        xh, xl = tl.where(m_odd, sh, ch), tl.where(m_odd, sl, cl)
        yh, yl = tl.where(m_odd, ch, sh), tl.where(m_odd, cl, sl)
        return (
            tl.where(m_cos, -xh, xh), tl.where(m_cos, -xl, xl),
            tl.where(m_sin, -yh, yh), tl.where(m_sin, -yl, yl),
        )  # fmt: skip

    @triton.jit
    def _integer(rh, rl, ch, cl, scale, FUSED: tl.constexpr):
        """Returns the integer nearest to scale·r·c."""
        p, e = _two_prod(rh, ch, FUSED)
        e = e + (rh * cl + rl * ch)
        p, f = _two_prod(p, p * 0 + scale, FUSED)
        b_whole = _rounded(p)
        return b_whole + _rounded((p - b_whole) + (f + e * scale))

    @triton.jit
    def _pair(w0, w1, w2, w3, w4, w5, scale, FUSED: tl.constexpr):
        """Returns two integers [BLOCK], side by side: [BLOCK, 2], float64."""
        rh, rl = _radius(w0, w1, w2, w3, FUSED)
        ch, cl, sh, sl = _cos_sin(w4, w5, FUSED)
        return tl.join(
            _integer(rh, rl, ch, cl, scale, FUSED), _integer(rh, rl, sh, sl, scale, FUSED)
        )

    @triton.jit
    def _integers(o_group, scale, k0, k1, k2, k3, k4, k5, k6, k7, FUSED: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
        """Returns the 16 integers of each group side by side: [16·BLOCK], float64."""
        a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15 = _chacha(
            3 * o_group, k0, k1, k2, k3, k4, k5, k6, k7
        )
        b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15 = _chacha(
            3 * o_group + 1, k0, k1, k2, k3, k4, k5, k6, k7
        )
        c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15 = _chacha(
            3 * o_group + 2, k0, k1, k2, k3, k4, k5, k6, k7
        )
        z0 = _pair(a0, a1, a2, a3, a4, a5, scale, FUSED)
        z1 = _pair(a6, a7, a8, a9, a10, a11, scale, FUSED)
        z2 = _pair(a12, a13, a14, a15, b0, b1, scale, FUSED)
        z3 = _pair(b2, b3, b4, b5, b6, b7, scale, FUSED)
        z4 = _pair(b8, b9, b10, b11, b12, b13, scale, FUSED)
        z5 = _pair(b14, b15, c0, c1, c2, c3, scale, FUSED)
        z6 = _pair(c4, c5, c6, c7, c8, c9, scale, FUSED)
        z7 = _pair(c10, c11, c12, c13, c14, c15, scale, FUSED)
        # A join adds a dimension behind the others: pairs i and i + 4 first, then i and i + 2.
        low = tl.join(tl.join(z0, z4), tl.join(z2, z6))
        high = tl.join(tl.join(z1, z5), tl.join(z3, z7))
        b_all = tl.join(low, high)  # [BLOCK, value, 4s, 2s, 1s] of the pair's number
        return tl.permute(b_all, (0, 2, 3, 4, 1)).reshape(16 * BLOCK)

    @triton.jit
    def _word(p_row, i: tl.constexpr):
        """Returns the two uint32 words of one int64 of the table."""
        word = tl.load(p_row + i)
        return word.to(tl.uint32), (word >> 32).to(tl.uint32)

    @triton.jit
    def _add_integers_kernel(
        p_rows, p_pieces, p_scales,
        DTYPE: tl.constexpr, HAS_ROWS: tl.constexpr, FUSED: tl.constexpr,
        RUN_WORDS: tl.constexpr, LOOPS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_row = tl.load(p_pieces + 2 * tl.program_id(0))
        i_piece = tl.load(p_pieces + 2 * tl.program_id(0) + 1)
        inverse = tl.load(p_scales).to(tl.float64, bitcast=True)
        scale = tl.load(p_scales + 1).to(tl.float64, bitcast=True)
        result_scale = tl.load(p_scales + 2).to(tl.float64, bitcast=True)
        p_row = p_rows + RUN_WORDS * i_row
        p_total = tl.load(p_row).to(tl.pointer_type(tl.float32))
        p_out = tl.load(p_row + 1).to(tl.pointer_type(DTYPE))
        n = tl.load(p_row + 2)
        k0, k1 = _word(p_row, 3)
        k2, k3 = _word(p_row, 4)
        k4, k5 = _word(p_row, 5)
        k6, k7 = _word(p_row, 6)
        n_left = tl.load(p_row + 7) - i_piece * LOOPS * BLOCK
        length, width = tl.load(p_row + 8), tl.load(p_row + 9)
        stride, offset = tl.load(p_row + 10), tl.load(p_row + 11)
        for i_loop in range(tl.minimum(LOOPS, tl.cdiv(n_left, BLOCK)).to(tl.int32)):
            first = (i_piece * LOOPS + i_loop) * BLOCK
            if HAS_ROWS:
                # Row and number in it of this block's groups: one division in 64 bits, for all.
                i_first = first // width
                o_block = (first - i_first * width).to(tl.uint32) + tl.arange(0, BLOCK).to(
                    tl.uint32
                )
                i_below = o_block // width.to(tl.uint32)
                o_group = (o_block - i_below * width.to(tl.uint32)).to(tl.int64)
                i_q = i_first + i_below.to(tl.int64)
                o_start = offset + i_q * stride
                o_r = (16 * o_group - (o_start & 15))[:, None] + tl.arange(0, 16)[None, :]
                o_n = i_q[:, None] * length + o_r
                m_n = ((o_r >= 0) & (o_r < length) & (o_n < n)).reshape(16 * BLOCK)
                o_n = o_n.reshape(16 * BLOCK)
                p_in, p_to = p_total + o_n, p_out + o_n
                o_group += o_start >> 4
            else:
                start = 16 * first - (offset & 15)
                o_n = tl.arange(0, 16 * BLOCK)
                m_n = o_n >= tl.maximum(-start, 0).to(tl.int32)
                m_n &= o_n < tl.minimum(n - start, 16 * BLOCK).to(tl.int32)
                p_in, p_to = p_total + start + o_n, p_out + start + o_n
                o_group = (offset >> 4) + first + tl.arange(0, BLOCK)
            b_noise = _integers(o_group, scale, k0, k1, k2, k3, k4, k5, k6, k7, FUSED, BLOCK)
            b_sum = tl.load(p_in, mask=m_n, other=0).to(tl.float64) * inverse
            b_sum = tl.where(b_sum > 2251799813685248.0, 2251799813685248.0, b_sum)
            b_sum = tl.where(b_sum < -2251799813685248.0, -2251799813685248.0, b_sum)
            b_out = ((_rounded(b_sum) + b_noise) * result_scale).to(tl.float32)
            tl.store(p_to, b_out.to(DTYPE), mask=m_n)
