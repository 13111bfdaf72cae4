"""Generates noise in registers and adds it: the fused counterpart of `gaussian.add_noise_plain`.

Traffic: n float32 values are read once and n of the output's dtype written, nothing else. Adding
what `torch.randn` returns would write and read the noise too, and could not generate a slice alone.
On an H200 (torch 2.11, Triton 3.6) `randn_like`, add, divide and copy of 2²⁸ values in float32 took
2.35 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.kernels.launch.tiles import (
    TRITON_DTYPES,
    ceil_div,
    kept_on_device,
    table_on,
    triton,
)

if triton is not None:
    import triton.language as tl

BLOCK = 256  # counters of one program; each gives four values
LOOPS = 16  # blocks of one program where many tensors share a launch
ROW_WORDS = 6  # address of the sum, of the result, size, seed, two counter words
RUN_WORDS = 11  # those, then counters in all, length of a row, counters of a row, stride, offset
LONGEST = 1 << 32  # elements of a row whose counters a program numbers in 32 bits


class Stream(Protocol):
    """A `gaussian.NoiseStream` as a launch takes it: four words below 2³²."""

    @property
    def key_0(self) -> int: ...

    @property
    def key_1(self) -> int: ...

    @property
    def counter_2(self) -> int: ...

    @property
    def counter_3(self) -> int: ...


def serves(total: Tensor) -> bool:
    """Returns whether this kernel, and not its reference, adds the noise to `total`."""
    return triton is not None and total.is_cuda and total.dtype == torch.float32


def add_noise_kernel_launch(
    total: Tensor, out: Tensor, stream: Stream, std: float, divisor: float, offset: int
) -> None:
    """Launches `out ← (total + std·z) / divisor`, cast last; `std` 0 adds nothing.

    Args:
        total: [n], float32, contiguous.
        out: [n], any floating dtype, contiguous; may be `total` itself.
        offset: the element of the stream that `total[0]` gets, at least 0.
    """
    n = total.numel()
    if n == 0:
        return
    first, shift = divmod(offset, 4)
    _add_noise_kernel[(ceil_div(shift + n, 4 * BLOCK),)](
        total, out, n, first, shift,
        _signed(stream.key_0 | stream.key_1 << 32, 64),
        _signed(stream.counter_2, 32), _signed(stream.counter_3, 32),
        float(std), float(divisor), 1 / divisor, ADD_NOISE=std != 0, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


class StreamTable:
    """The tables of launches that a CUDA graph has captured, whose streams change with each step.

    Args:
        size: rows of all launches together.
    """

    def __init__(self, size: int, device: torch.device):
        self._words = torch.zeros(size, ROW_WORDS, dtype=torch.int64, device=device)
        self._rows: list[tuple[int, list[int]]] = []  # number of the stream, and addresses

    def take(self, numbers: list[int], rows: list[list[int]]) -> Tensor:
        """Returns rows that a launch reads in place of a table, and that `write` fills.

        Args:
            numbers: which of the streams that `write` is given each row has.
        """
        start = len(self._rows)
        self._rows += [(n, row[:3]) for n, row in zip(numbers, rows, strict=True)]
        return self._words[start : len(self._rows)]

    def write(self, streams: Sequence[Stream]) -> None:
        """Sets what later launches read; copied in the order of the device's work."""
        words = _words_in_rows(streams)
        rows = [[*addresses, *words[n]] for n, addresses in self._rows]
        if rows:
            table = torch.tensor(rows, dtype=torch.int64, pin_memory=self._words.is_cuda)
            self._words[: len(rows)].copy_(table, non_blocking=True)


def _words_in_rows(streams: Sequence[Stream]) -> list[tuple[int, int, int]]:
    """Returns the last three words of each stream's row; `_signed` without a call for each."""
    return [
        ((s.key_0 | s.key_1 << 32) - (s.key_1 >> 31 << 64), s.counter_2, s.counter_3)
        for s in streams
    ]


def add_noise_to_all_kernel_launch(
    totals: list[Tensor], outs: list[Tensor], streams: list[Stream], std: float, divisor: float,
    make_table: Callable[[list[list[int]]], Tensor] | None = None,
) -> None:  # fmt: skip
    """Launches `add_noise_kernel_launch` for many tensors, each from the start of its stream.

    A network has hundreds of parameters, most of them small: one launch each would keep the GPU
    waiting for the host. Programs find their tensor by a table of addresses.

    Args:
        totals: tensors of any sizes, float32, contiguous, on one device.
        outs: tensors of one dtype, contiguous; each may be its total itself.
        make_table: takes the rows to the device; default: copies them.
    """
    sizes = tuple([total.numel() for total in totals])
    pieces = pieces_of(sizes, totals[0].device)
    if not len(pieces):
        return
    sums = [total.data_ptr() for total in totals]
    results = [out.data_ptr() for out in outs]
    rows = [
        [address, result, size, *words]
        for address, result, size, words in zip(
            sums, results, sizes, _words_in_rows(streams), strict=True
        )
    ]
    table = table_on(totals[0].device, rows) if make_table is None else make_table(rows)
    _add_noise_to_all_kernel[(len(pieces),)](
        table, pieces, float(std), float(divisor), 1 / divisor,
        DTYPE=TRITON_DTYPES[outs[0].dtype], ROW_WORDS=ROW_WORDS, LOOPS=LOOPS, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip


def add_noise_to_parts_kernel_launch(
    totals: list[Tensor], outs: list[Tensor], streams: list[Stream], places: list[Place],
    std: float, divisor: float,
) -> None:  # fmt: skip
    """Adds noise to parts of parameters: each element gets the value of its place in the whole.

    Each run of a part is a row of the table. Programs number its counters row by row of the run:
    counter j of row q holds values from 4(⌊(offset + q·stride) / 4⌋ + j) on. Where rows begin and
    end inside of a counter, those at both ends are generated for some of their values only. Where
    none does, elements lie as the counters do, and addresses need no row.
    """
    runs = [(i, run) for i, place in enumerate(places) for run in within_reach(place)]
    for aligned in (True, False):
        alike = [(i, run) for i, run in runs if _is_aligned(run) == aligned]
        if not alike:
            continue
        widths = [ceil_div(run.length + (0 if aligned else 3), 4) for _, run in alike]
        rows = [
            (
                totals[i].data_ptr() + run.local_start * totals[i].element_size(),
                outs[i].data_ptr() + run.local_start * outs[i].element_size(), run.numel,
                _signed(streams[i].key_0 | streams[i].key_1 << 32, 64),
                streams[i].counter_2, streams[i].counter_3,
                run.count * width, run.length, width, run.stride, run.offset,
            )
            for (i, run), width in zip(alike, widths, strict=True)
        ]  # fmt: skip
        counters = (4 * run.count * width for (_, run), width in zip(alike, widths, strict=True))
        pieces = pieces_of(tuple(counters), totals[0].device)
        table = table_on(totals[0].device, rows)
        _add_noise_to_parts_kernel[(len(pieces),)](
            table, pieces, float(std), float(divisor), 1 / divisor,
            DTYPE=TRITON_DTYPES[outs[0].dtype], ALIGNED=aligned, RUN_WORDS=RUN_WORDS, LOOPS=LOOPS,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def _is_aligned(run: Span) -> bool:
    """Returns whether every row begins with a counter, and every row but the last ends with one."""
    lengths = (run.length, run.stride) if run.count > 1 else ()
    return not any(n % 4 for n in (run.offset, *lengths))


def within_reach(place: Place) -> Place:
    """Returns the same place, in runs of rows that 32 bits count."""
    if all(run.length <= LONGEST for run in place):
        return place
    return tuple(
        replace(
            run,
            local_start=run.local_start + q * run.length + r,
            offset=run.offset + q * run.stride + r,
            length=min(LONGEST, run.length - r),
            count=1,
        )
        for run in place
        for q in range(run.count)
        for r in range(0, run.length, LONGEST)
    )


@kept_on_device(maxsize=8)
def pieces_of(
    sizes: tuple[int, ...], device: torch.device, each: int = 4 * BLOCK * LOOPS
) -> Tensor:
    """Returns which piece of which tensor each program serves: [programs, 2] int64.

    Args:
        sizes: of the tensors.
        each: the size of a piece.
    """
    counts = [-(-n // each) for n in sizes]
    pairs = [
        torch.stack((torch.full((c,), i), torch.arange(c)), dim=1) for i, c in enumerate(counts)
    ]
    return torch.cat(pairs).to(device)


def _signed(word: int, bits: int) -> int:
    """Reinterprets a word as signed.

    Triton chooses an argument's type by its value. Without a sign bit the type, and with it the
    compiled kernel, would depend on the key.
    """
    return word - (1 << bits) if word >> (bits - 1) else word


if triton is not None:

    @triton.jit
    def _words(first, seed, c2, c3, BLOCK: tl.constexpr):
        """Returns the four words [BLOCK] uint32 of this program's counters, starting at `first`."""
        return _words_at(first + tl.program_id(0).to(tl.int64) * BLOCK, seed, c2, c3, BLOCK)

    @triton.jit
    def _words_at(first, seed, c2, c3, BLOCK: tl.constexpr):
        """Returns the four words [BLOCK] uint32 of the counters from `first` on."""
        return _words_of(first + tl.arange(0, BLOCK), seed, c2, c3)

    @triton.jit
    def _words_of(o_counter, seed, c2, c3):
        """Returns the four words uint32 of int64 counters, by Philox4x32-10."""
        x0, x1 = o_counter.to(tl.uint32), (o_counter >> 32).to(tl.uint32)
        x2, x3 = c2.to(tl.uint32, bitcast=True), c3.to(tl.uint32, bitcast=True)
        seed = seed.to(tl.int64)  # the interpreter passes a small one as 32 bits
        k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        for _ in tl.static_range(10):
            # One multiplication gives both halves; `tl.philox` multiplies once for each.
            p0, p1 = x0.to(tl.uint64) * 0xD2511F53, x2.to(tl.uint64) * 0xCD9E8D57
            x0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ k0
            x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ k1
            x1, x3 = p1.to(tl.uint32), p0.to(tl.uint32)
            k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
            k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
        return x0, x1, x2, x3

    @triton.jit
    def _normals(w_radius, w_angle):
        """Computes Box-Muller on two words [BLOCK], without a library's special cases."""
        b_radius = _radius(w_radius)
        b_cos, b_sin = _cos_sin(w_angle)
        return b_radius * b_cos, b_radius * b_sin

    @triton.jit
    def _radius(w):
        """Computes √(−2 ln u), u = (w + ½)/2³² in (0, 1] rounded to float32 as in the reference.

        u = 2ᵉ(1 + f) with |f| ≤ 1/3, so that −2 ln u = −2 ln 2 · e + f·p(f). Over all words the
        root of this sum is off by less than 1.8e-7 (3.2e-7 where products are rounded before they
        are added), and a GPU's root adds 2⁻²³ of itself: less than 9.3e-7 together. The sum is not
        negative anywhere; it is zero where u rounds to 1.
        """
        b_u = w.to(tl.float32) * 2.0**-32 + 2.0**-33
        b_bits = b_u.to(tl.int32, bitcast=True)
        b_exponent = (b_bits - 0x3F2AAAAB) & -0x800000  # e · 2²³; the bits subtracted are 2/3's
        f = (b_bits - b_exponent).to(tl.float32, bitcast=True) - 1.0
        p = 0.32557014 * f - 0.34344143
        p = p * f + 0.32435727
        p = p * f - 0.39576316
        p = p * f + 0.5004274
        p = p * f - 0.66675776
        p = p * f + 0.99999326
        p = p * f - 2.0
        return tl.sqrt(tl.fma(b_exponent.to(tl.float32), -1.6525917e-07, p * f))

    @triton.jit
    def _cos_sin(w):
        """Computes cosine and sine of w·π/2³¹, off by less than 9e-8 each.

        The angle is q quarter turns and a rest πt of at most an eighth. The low 30 bits of w, read
        as a signed integer, are 2³¹t: exact, so that only their conversion to float32 rounds the
        angle. Both polynomials in t are within 7.2e-8 of their functions for every float32 in
        [−¼, ¼], of which the terms left out are 5e-9; the conversion is the rest.
        """
        t = (w << 2).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-33
        u = t * t
        b_sin = ((-0.5829332 * u + 2.5491157) * u - 5.1676884) * u + 3.1415925
        b_sin *= t
        b_cos = (((0.22875105 * u - 1.3347361) * u + 4.0586963) * u - 4.934802) * u + 1.0
        q = tl.add(w, 1 << 29, sanitize_overflow=False) >> 30  # wraps as a turn does
        m_odd = (q & 1) != 0
        b_first, b_second = tl.where(m_odd, b_sin, b_cos), tl.where(m_odd, b_cos, b_sin)
        b_first = tl.where(((q + 1) & 2) != 0, -b_first, b_first)
        return b_first, tl.where((q & 2) != 0, -b_second, b_second)

    @triton.jit
    def _normals_of(w0, w1, w2, w3, BLOCK: tl.constexpr):
        """Returns four values per counter, z0 z1 z2 z3 side by side: [4·BLOCK]."""
        z0, z1 = _normals(w0, w1)
        z2, z3 = _normals(w2, w3)
        return tl.join(tl.join(z0, z2), tl.join(z1, z3)).reshape(4 * BLOCK)

    @triton.jit
    def _quotient(b_sum, divisor, inverse):
        """Computes b_sum / divisor from `inverse` = 1 / divisor, rounded by one Newton step.

        A library's division does the same, but looks at each value first, for those whose exponent
        could leave the range. Here an infinite sum gives NaN.
        """
        b_q = b_sum * inverse
        return tl.fma(tl.fma(-b_q, divisor, b_sum), inverse, b_q)

    # The key and the counter change with every step: no compiled variant may depend on them, nor
    # on whether a key happens to fit in 32 bits.
    @triton.jit(do_not_specialize=["first", "seed", "c2", "c3"])
    def _add_noise_kernel(
        p_total, p_out, n, first, shift, seed: tl.int64, c2, c3, std, divisor, inverse,
        ADD_NOISE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        o_n = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK) - shift
        m_n = (o_n >= 0) & (o_n < n)
        b_sum = tl.load(p_total + o_n, mask=m_n, other=0)
        if ADD_NOISE:
            w0, w1, w2, w3 = _words(first, seed, c2, c3, BLOCK)
            b_sum += std * _normals_of(w0, w1, w2, w3, BLOCK)
        b_out = _quotient(b_sum, divisor, inverse)
        tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)

    @triton.jit
    def _add_noise_to_all_kernel(
        p_rows, p_pieces, std, divisor, inverse,
        DTYPE: tl.constexpr, ROW_WORDS: tl.constexpr, LOOPS: tl.constexpr, BLOCK: tl.constexpr,
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
            tl.store(p_out + o_n, _quotient(b_sum, divisor, inverse).to(DTYPE), mask=m_n)

    @triton.jit
    def _add_noise_to_parts_kernel(
        p_rows, p_pieces, std, divisor, inverse,
        DTYPE: tl.constexpr, ALIGNED: tl.constexpr, RUN_WORDS: tl.constexpr, LOOPS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_row = tl.load(p_pieces + 2 * tl.program_id(0))
        i_piece = tl.load(p_pieces + 2 * tl.program_id(0) + 1)
        p_row = p_rows + RUN_WORDS * i_row
        p_total = tl.load(p_row).to(tl.pointer_type(tl.float32))
        p_out = tl.load(p_row + 1).to(tl.pointer_type(DTYPE))
        n, seed = tl.load(p_row + 2), tl.load(p_row + 3)
        c2, c3 = tl.load(p_row + 4).to(tl.int32), tl.load(p_row + 5).to(tl.int32)
        n_left = tl.load(p_row + 6) - i_piece * LOOPS * BLOCK
        length, width = tl.load(p_row + 7), tl.load(p_row + 8)
        stride, offset = tl.load(p_row + 9), tl.load(p_row + 10)
        for i_loop in range(tl.minimum(LOOPS, tl.cdiv(n_left, BLOCK)).to(tl.int32)):
            # Row and number in it of this block's counters: one division in 64 bits, for all.
            first = (i_piece * LOOPS + i_loop) * BLOCK
            i_first = first // width
            o_block = (first - i_first * width).to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
            i_below = o_block // width.to(tl.uint32)
            o_counter = (o_block - i_below * width.to(tl.uint32)).to(tl.int64)
            i_q = i_first + i_below.to(tl.int64)
            o_start = offset + i_q * stride
            w0, w1, w2, w3 = _words_of((o_start >> 2) + o_counter, seed, c2, c3)
            if ALIGNED:
                o_n = 4 * first + tl.arange(0, 4 * BLOCK)
                m_n = o_n < n
            else:
                o_r = (4 * o_counter - (o_start & 3))[:, None] + tl.arange(0, 4)[None, :]
                o_n = i_q[:, None] * length + o_r
                m_n = ((o_r >= 0) & (o_r < length) & (o_n < n)).reshape(4 * BLOCK)
                o_n = o_n.reshape(4 * BLOCK)
            b_sum = tl.load(p_total + o_n, mask=m_n, other=0)
            b_sum += std * _normals_of(w0, w1, w2, w3, BLOCK)
            tl.store(p_out + o_n, _quotient(b_sum, divisor, inverse).to(DTYPE), mask=m_n)
