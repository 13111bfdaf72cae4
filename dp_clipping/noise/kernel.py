"""Generates noise in registers and adds it: the fused counterpart of `gaussian.add_noise_plain`.

Traffic: n float32 values are read once and n of the output's dtype written, nothing else. Adding
what `torch.randn` returns would write and read the noise too, and could not generate a slice alone.
On an H200 (torch 2.11, Triton 3.6) `randn_like`, add, divide and copy of 2²⁸ values in float32 took
2.35 ms.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.kernels.launch.tiles import ceil_div, kept_on_device, launch, table_on, triton

if triton is not None:
    import triton.language as tl

    from dp_clipping.noise.registers import _noise_of, _numbers_of_update, _old, _quotient, _updated

BLOCK = 256  # counters of one program; each gives four values
LOOPS = 16  # blocks of one program where many tensors share a launch
ROW_WORDS = 6  # address of the sum, of the result, size, seed, two counter words
UPDATE_WORDS = 10  # of `fused_update.Update.row`
RUN_WORDS = 11  # those, then counters in all, length of a row, counters of a row, stride, offset
EARLIER_WORDS = 4  # behind a row, for each earlier stream: seed, two counter words, weight's bits


Stream = tuple[int, int, int, int]
"""A `gaussian.NoiseStream` as a launch takes it: four words below 2³²."""

Earlier = Sequence[tuple[float, Sequence[Stream]]]
"""Weights of earlier streams, and with each its streams: as many as there are totals."""


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
            table = torch.tensor(
                rows, dtype=torch.int64, pin_memory=self._words.is_cuda, device="cpu"
            )
            self._words[: len(rows)].copy_(table, non_blocking=True)


def _words_in_rows(streams: Sequence[Stream]) -> list[tuple[int, int, int]]:
    """Returns the last three words of each stream's row: the first one signed, as int64 is."""
    return [
        ((key_0 | key_1 << 32) - (key_1 >> 31 << 64), counter_2, counter_3)
        for key_0, key_1, counter_2, counter_3 in streams
    ]


def _earlier_words(earlier: Earlier) -> list[list[int]]:
    """Returns what stands behind the row of each total: `EARLIER_WORDS` of each earlier stream."""
    rows: list[list[int]] = [[] for _ in earlier[0][1]]
    for weight, streams in earlier:
        (bits,) = struct.unpack("<I", struct.pack("<f", weight))
        for row, words in zip(rows, _words_in_rows(streams), strict=True):
            row += (*words, bits)
    return rows


def add_noise_kernel_launch(
    totals: list[Tensor], outs: list[Tensor], streams: Sequence[Stream],
    places: Sequence[Place] | None, std: float, divisor: float,
    make_table: Callable[[list[list[int]]], Tensor] | None = None, earlier: Earlier = (),
    updates: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Launches `out ← (total + std·(z + Σ w·z')) / divisor`, cast last, for many tensors.

    A network has hundreds of parameters, most of them small: one launch each would keep the GPU
    waiting for the host. Programs find their tensor by a table of addresses.

    Of a part of a parameter each run is a row of the table, and each element gets the z of its
    place in the whole. Programs number its counters row by row of the run: counter j of row q holds
    values from 4(⌊(offset + q·stride) / 4⌋ + j) on. Where rows begin and end inside of a counter,
    those at both ends are generated for some of their values only. Where none does, elements lie as
    the counters do, and addresses need no row.

    Args:
        totals: tensors of any sizes, float32, contiguous, on one device.
        outs: tensors of one dtype, contiguous; each may be its total itself.
        places: where each total lies in its parameter; None: all are whole parameters.
        make_table: takes the rows of whole parameters to the device; default: copies them.
        earlier: further noise, which is generated in the same registers and added with its weight.
        updates: of each total a `fused_update.Update`, all of one rule, if the result is not to be
            written, but to update what is in `outs`: the parameters.
    """
    words, device, dtype = _words_in_rows(streams), totals[0].device, outs[0].dtype
    behind = _earlier_words(earlier) if earlier else [[]] * len(totals)
    if places is None:
        sizes = [total.numel() for total in totals]
        rows = [
            [total.data_ptr(), out.data_ptr(), n, *own, *more]
            for total, out, n, own, more in zip(totals, outs, sizes, words, behind, strict=True)
        ]
        _launch(
            device, dtype, "whole", rows, sizes, std, divisor, len(earlier), make_table,
            updates[0].rule if updates else "none", [update.row() for update in updates],
        )  # fmt: skip
        return
    for kind in ("aligned", "rows"):
        rows, sizes, of_updates = [], [], []
        for i, place in enumerate(places):
            for run in place:
                if _is_aligned(run) != (kind == "aligned"):
                    continue
                width = ceil_div(run.length + (0 if kind == "aligned" else 3), 4)
                rows.append([*run_row(totals[i], outs[i], run, width, words[i]), *behind[i]])
                sizes.append(4 * run.count * width)
                of_updates += [updates[i].row(run.local_start)] if updates else []
        _launch(
            device, dtype, kind, rows, sizes, std, divisor, len(earlier), None,
            updates[0].rule if updates else "none", of_updates,
        )  # fmt: skip


def run_row(total: Tensor, out: Tensor, run: Span, width: int, words: Iterable[int]) -> list[int]:
    """Returns the row of a table for a run of a part, `width` counters for each of its rows."""
    return [
        total.data_ptr() + run.local_start * total.element_size(),
        out.data_ptr() + run.local_start * out.element_size(), run.numel, *words,
        run.count * width, run.length, width, run.stride, run.offset,
    ]  # fmt: skip


def _launch(
    device: torch.device, dtype: torch.dtype, kind: str, rows: list[list[int]], sizes: list[int],
    std: float, divisor: float, earlier: int,
    make_table: Callable[[list[list[int]]], Tensor] | None, rule: str, updates: list[list[int]],
) -> None:  # fmt: skip
    """Launches the kernel for rows of one kind, of which each has so many values."""
    pieces = pieces_of(tuple(sizes), device) if sizes else None
    if pieces is None or not len(pieces):
        return
    launch(
        _add_noise_kernel, (len(pieces),),
        (
            table_on(device, chain.from_iterable(rows)) if make_table is None else make_table(rows),
            pieces, table_on(device, chain.from_iterable(updates)) if updates else None,
        ),
        (earlier, float(std), float(divisor), 1 / divisor), DTYPE=dtype, KIND=kind, RULE=rule,
        ROW_WORDS=ROW_WORDS if kind == "whole" else RUN_WORDS,
        EARLIER_WORDS=EARLIER_WORDS if earlier else 0, UPDATE_WORDS=UPDATE_WORDS, LOOPS=LOOPS,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _is_aligned(run: Span) -> bool:
    """Returns whether every row begins with a counter, and every row but the last ends with one."""
    lengths = (run.length, run.stride) if run.count > 1 else ()
    return not any(n % 4 for n in (run.offset, *lengths))


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
        torch.stack((torch.full((c,), i, device="cpu"), torch.arange(c, device="cpu")), dim=1)
        for i, c in enumerate(counts)
    ]
    return torch.cat(pairs).to(device)


if triton is not None:

    @triton.jit(do_not_specialize=["n_earlier"])
    def _add_noise_kernel(
        p_rows, p_pieces, p_updates, n_earlier, std, divisor, inverse,
        DTYPE: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, ROW_WORDS: tl.constexpr,
        EARLIER_WORDS: tl.constexpr, UPDATE_WORDS: tl.constexpr, LOOPS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        i_row = tl.load(p_pieces + 2 * tl.program_id(0))
        i_piece = tl.load(p_pieces + 2 * tl.program_id(0) + 1)
        p_row = p_rows + (ROW_WORDS + EARLIER_WORDS * n_earlier) * i_row
        p_update = p_updates
        words = tl.load(p_row) | tl.load(p_row + 1) | tl.load(p_row + 2)
        if RULE != "none":
            p_update += UPDATE_WORDS * i_row
            words |= tl.load(p_update) | tl.load(p_update + 1)
        if KIND == "rows":
            words |= 1  # rows begin anywhere
        if words % 16 == 0:
            _add_noise(
                p_row, p_update, i_piece, n_earlier, std, divisor, inverse, DTYPE, KIND, RULE,
                ROW_WORDS, EARLIER_WORDS, LOOPS, BLOCK, True,
            )  # fmt: skip
        else:
            _add_noise(
                p_row, p_update, i_piece, n_earlier, std, divisor, inverse, DTYPE, KIND, RULE,
                ROW_WORDS, EARLIER_WORDS, LOOPS, BLOCK, False,
            )  # fmt: skip

    @triton.jit
    def _add_noise(
        p_row, p_update, i_piece, n_earlier, std, divisor, inverse,
        DTYPE: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, ROW_WORDS: tl.constexpr,
        EARLIER_WORDS: tl.constexpr, LOOPS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    ):  # fmt: skip
        """Serves one piece of a row.

        EVEN: addresses and size are multiples of 16, so that threads load and store several
        elements at once.
        """
        p_total = tl.load(p_row).to(tl.pointer_type(tl.float32))
        p_out = tl.load(p_row + 1).to(tl.pointer_type(DTYPE))
        n, seed = tl.load(p_row + 2), tl.load(p_row + 3)
        c2, c3 = tl.load(p_row + 4).to(tl.int32), tl.load(p_row + 5).to(tl.int32)
        if RULE != "none":
            p_first = tl.load(p_update).to(tl.pointer_type(DTYPE))
            p_second = tl.load(p_update + 1).to(tl.pointer_type(DTYPE))
            size, root, decay, keep, take, keep_2, take_2, epsilon = _numbers_of_update(
                p_update + 2, RULE
            )
            if EVEN:
                p_first, p_second = tl.multiple_of(p_first, 16), tl.multiple_of(p_second, 16)
        if EVEN:
            p_total, p_out = tl.multiple_of(p_total, 16), tl.multiple_of(p_out, 16)
            n = tl.multiple_of(n, 16)
        n_loops = LOOPS
        if KIND != "whole":
            n_left = tl.load(p_row + 6) - i_piece * LOOPS * BLOCK
            n_loops = tl.minimum(LOOPS, tl.cdiv(n_left, BLOCK)).to(tl.int32)
            length, width = tl.load(p_row + 7), tl.load(p_row + 8)
            stride, offset = tl.load(p_row + 9), tl.load(p_row + 10)
        for i_loop in range(n_loops):
            first = (i_piece * LOOPS + i_loop) * BLOCK
            o_counter = first + tl.arange(0, BLOCK)
            o_n = 4 * first + tl.arange(0, 4 * BLOCK)
            m_n = o_n < n
            if KIND != "whole":
                # Row and number in it of this block's counters: one division in 64 bits, for all.
                i_first = first // width
                o_block = (first - i_first * width).to(tl.uint32) + tl.arange(0, BLOCK).to(
                    tl.uint32
                )
                i_below = o_block // width.to(tl.uint32)
                o_counter = (o_block - i_below * width.to(tl.uint32)).to(tl.int64)
                i_q = i_first + i_below.to(tl.int64)
                o_start = offset + i_q * stride
                if KIND == "rows":
                    o_r = (4 * o_counter - (o_start & 3))[:, None] + tl.arange(0, 4)[None, :]
                    o_n = i_q[:, None] * length + o_r
                    m_n = ((o_r >= 0) & (o_r < length) & (o_n < n)).reshape(4 * BLOCK)
                    o_n = o_n.reshape(4 * BLOCK)
                o_counter += o_start >> 2
            b_sum = tl.load(p_total + o_n, mask=m_n, other=0)
            if RULE != "none":  # before the noise is generated, which takes longer
                w, m, v = _old(p_out + o_n, p_first + o_n, p_second + o_n, m_n, RULE)
            b_sum += std * _noise_of(
                o_counter, seed, c2, c3, p_row + ROW_WORDS, n_earlier, EARLIER_WORDS, BLOCK
            )
            b_mean = _quotient(b_sum, divisor, inverse).to(DTYPE)
            if RULE == "none":
                tl.store(p_out + o_n, b_mean, mask=m_n)
            else:
                w, m, v = _updated(
                    w, m, v, b_mean.to(tl.float32),
                    size, root, decay, keep, take, keep_2, take_2, epsilon, RULE,
                )  # fmt: skip
                tl.store(p_out + o_n, w.to(DTYPE), mask=m_n)
                if RULE != "sgd":
                    tl.store(p_first + o_n, m.to(DTYPE), mask=m_n)
                if RULE == "adam" or RULE == "adamw":
                    tl.store(p_second + o_n, v.to(DTYPE), mask=m_n)
