"""Reads tiles of [B, T, x] operands, in the order that all matrix kernels share.

Operands that the bulk copy engine takes (last stride 1, all others and the address multiples of 16
bytes) are read through tensor descriptors, three-dimensional ones, so that a tile that reaches past
a sample's last token is filled with zeros. Any other operand is read through pointers and masks.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.knobs import runtime
    from triton.runtime import driver
except ImportError:  # no Triton on this platform: reference implementations serve
    triton, tl, TRITON_DTYPES = None, None, {}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes, of addresses and strides that the bulk copy engine takes
LARGEST_STRIDE = 1 << 40  # bytes
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of tensors on the host that kernels run on: the interpreter's products in bfloat16 are wrong.
HOST_DTYPES = (torch.float32, torch.float16) if INTERPRETED else ()


class Tile(NamedTuple):
    """Tile sizes, warps and stages of one program.

    Attributes:
        rows, columns: of the result that it accumulates.
        depth: elements of the summed dimension that are loaded at a time.
        warps, stages: of Triton's compiler; stages are tiles in flight.
        speed: of results that fill it, relative to the kernel's other tiles.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    speed: float = 1.0


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether kernels run on tensors of that device and dtype.

    On a GPU with Triton, or anywhere in Triton's interpreter.
    """
    return triton is not None and dtype in (DTYPES if device.type == "cuda" else HOST_DTYPES)


def ceil_div(a: int, b: int) -> int:
    """Returns ⌈a / b⌉; Triton's own is made for kernels, and takes microseconds on the host."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """Returns the least power of two that is at least n, which is at least 1; see `ceil_div`."""
    return 1 << (n - 1).bit_length()


_holders: list[list[Any]] = []


@contextmanager
def holding(holder: list[Any]) -> Iterator[None]:
    """Enters a context that keeps what `held` is given, since a captured graph will read it."""
    _holders.append(holder)
    try:
        yield
    finally:
        _holders.pop()


def held(x: Any) -> Any:
    """Returns x, which lives as long as the graphs that are being captured."""
    for holder in _holders:
        holder.append(x)
    return x


def kept_on_device(maxsize: int) -> Callable[[Callable], Callable]:
    """Decorates a function that makes a tensor of its arguments, as `lru_cache` does.

    A copy to a GPU would make the host wait for it. A graph holds what it was captured with.
    """

    def decorate(function: Callable) -> Callable:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: Any) -> Any:
            return held(kept(*args)) if _holders else kept(*args)

        return call

    return decorate


@kept_on_device(maxsize=256)
def on_device(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of these values; errors of norms are others for each length of a batch."""
    return torch.tensor(values, dtype=dtype, device=device)


def table_on(device: torch.device, numbers: Iterable[int]) -> Tensor:
    """Returns numbers (int64) that a launch reads, copied in the order of the device's work.

    From pinned memory: a copy from any other may first wait for all that the device has to do.
    """
    table = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()
    found = table.to(device, non_blocking=True)
    if _holders:
        held((table, found))
    return found


def kept_table_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Returns `table_on`, cached.

    Where batches have one size, a step's addresses equal those of the last step.

    On another stream than the one that asked first, it is there when the operands are that it
    describes: both were written before that stream could be told to go on. In a CUDA graph that is
    captured nothing is written yet, so nothing is kept.
    """
    return table_on(device, numbers) if _holders else _kept_table_on(device, numbers)


_kept_table_on = lru_cache(maxsize=4096)(table_on)


# Triton binds the arguments of each launch, derives from their types, alignment and values which
# compiled variant serves them, and makes its key a string: 18 µs in Python, 11 with `launch`, which
# a step of a hundred launches waits for. All of it follows from what `launch` looks up at once.

MOST_KNOWN = 1 << 13  # kinds of launches: batches and lengths vary
# `run` of a compiled kernel is no public interface. With another Triton, Triton launches.
IS_CHECKED = triton is not None and triton.__version__.startswith(("3.6.", "3.7."))

_known: dict[tuple, tuple] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None],
    numbers: tuple[float, ...] = (), **constants: Any,
) -> None:  # fmt: skip
    """Launches a kernel, as `kernel[grid](*tensors, *numbers, **constants)` does.

    Args:
        tensors: its first arguments, the first of them on the device that it runs on.
        numbers: the arguments behind them; each is an int in all calls, or a float in all.
        constants: its `constexpr` parameters and the options of the compiler. A dtype is PyTorch's.
    """
    device = tensors[0].device
    kinds: list[Any] = [id(kernel), device, numbers, *constants.items()]
    for x in tensors:
        kinds += (None,) if x is None else (x.dtype, x.data_ptr() % ALIGNMENT == 0)
    key = tuple(kinds)
    known = _known.get(key)
    if known is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        named = {n: TRITON_DTYPES[x] if type(x) is torch.dtype else x for n, x in constants.items()}
        compiled = kernel[grid](*tensors, *numbers, **named)
        if compiled is not None and IS_CHECKED:  # None in the interpreter
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            names = kernel.arg_names[len(tensors) + len(numbers) :]
            values = [named[name] for name in names]
            stream_of = driver.active.get_current_stream
            own = compiled.run, compiled.function, compiled.packed_metadata
            _known[key] = *own, stream_of, values
        return
    run, function, metadata, stream_of, values = known
    sizes, stream = (*grid, 1, 1)[:3], stream_of(device.index)
    run(*sizes, stream, function, metadata, None, None, None, *tensors, *numbers, *values)


def tile_of(size: int | None, *dtypes: torch.dtype) -> Tile | None:
    """Returns a square tile for operands of these dtypes; None: the kernels' own choice.

    The widest dtype needs most memory, and limits the tile.
    """
    if size is None:
        return None
    return Tile(size, size, min(size, 128 // max(dtype.itemsize for dtype in dtypes)), 4, 3)


@lru_cache(maxsize=4096)
def default_tile(shapes: tuple[tuple[int, int, int], ...], tiles: tuple[Tile, ...]) -> Tile:
    """Returns the tile that is fastest by what its copies cover of results [n, d, p] each."""

    def time(tile: Tile) -> float:
        return sum(
            n * ceil_div(d, tile.rows) * tile.rows * ceil_div(p, tile.columns) * tile.columns
            for n, d, p in shapes
        ) / tile.speed  # fmt: skip

    return min(tiles, key=time)


def is_aligned(addresses: list[int], strides: list[int], size: int) -> bool:
    """Returns whether the bulk copy engine takes operands whose elements have `size` bytes.

    Args:
        strides: of all but the last dimension, in elements.
    """
    return (
        gcd(*addresses) % ALIGNMENT == 0  # each of them is a multiple
        and gcd(*strides) * size % ALIGNMENT == 0
        and min(strides) > 0
        and max(strides) * size < LARGEST_STRIDE
    )


def readable(x: Tensor) -> Tensor:
    """Returns x [B, T, n] itself, or a copy of it where the kernels cannot read its strides."""
    return x if x.stride(2) == 1 or x.numel() == 0 else x.contiguous()


if triton is not None:
    TRITON_DTYPES = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }

    @triton.jit
    def _row_of(p_starts, n_rows, MOST: tl.constexpr):
        """Returns the row of this program, and its number within it."""
        i_program = tl.program_id(0)
        o_row = tl.arange(0, MOST)
        b_starts = tl.load(p_starts + o_row, mask=o_row < n_rows, other=2147483647)
        i_row = tl.sum((b_starts <= i_program).to(tl.int32)) - 1
        return i_row, i_program - tl.load(p_starts + i_row).to(tl.int32)

    @triton.jit
    def _load_tile(
        x, i_b, o_t, o_x, T, X, s_b, s_t,
        DESCRIBED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr,
    ):  # fmt: skip
        """Returns [BLOCK_T, BLOCK_X] of sample i_b from (o_t, o_x) on; zeros outside of [T, X]."""
        if DESCRIBED:
            b_x = x.load([i_b, o_t, o_x]).reshape(BLOCK_T, BLOCK_X)
        else:
            o_rows, o_columns = o_t + tl.arange(0, BLOCK_T), o_x + tl.arange(0, BLOCK_X)
            p_x = x + tl.cast(i_b, tl.int64) * s_b
            p_x += o_rows[:, None].to(tl.int64) * s_t + o_columns[None, :]
            b_x = tl.load(p_x, mask=(o_rows[:, None] < T) & (o_columns[None, :] < X), other=0)
        return b_x

    @triton.jit
    def _tile_of(i_tile, n_rows, n_columns, GROUP: tl.constexpr):
        """Returns row and column of tile number i_tile, in groups of GROUP rows.

        So neighbouring programs read from the second-level cache.
        """
        n_group = GROUP * n_columns
        i_first = i_tile // n_group * GROUP
        n_own = min(n_rows - i_first, GROUP)
        return i_first + i_tile % n_group % n_own, i_tile % n_group // n_own

    @triton.jit
    def _token_norms(b_squares, features, LOST: tl.constexpr):
        """Returns norms of rows from the diagonal of a Gram matrix, with what may be lost of it."""
        return tl.sqrt(tl.maximum(b_squares, 0.0)) + tl.sqrt(features.to(tl.float32)) * LOST
