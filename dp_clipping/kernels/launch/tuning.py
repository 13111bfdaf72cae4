"""Chooses a matrix kernel's tile: the fastest candidate, measured once and stored.

A kernel's default needs no tuning, but another tile may suit a shape or a GPU better. With
`DP_CLIPPING_TUNE=1` in the environment a kernel's first launch on a class of operands times all
candidates on these operands and takes the fastest; those that do not compile, or need more shared
memory than there is, are left out. A class is the kernel, how it reads (tensor descriptors or
pointers), the dtype, the number of pairs in the launch, and the dimensions, each number rounded up
to a power of two: batches and lengths that vary fall into few classes. Each costs the compilation
of all candidates and a few launches of each.

Tiles are kept in `$XDG_CACHE_HOME/dp_clipping/tiles.json` (`~/.cache/dp_clipping` without that
variable), by device, torch and Triton. A file that cannot be read, or that holds something else,
counts as none. Later processes read the tiles once, with or without the variable; then a launch is
one look in a dictionary. Deleting the file forgets all. `tile_size` comes before any choice.

Neither tuned nor looked up: on the CPU, in Triton's interpreter, while `torch.compile` traces. Not
tuned, but a later launch is: while a CUDA graph is captured. Tiles differ in the order of their
sums, so a run before tuning and one after it may differ in the last bits. Processes that tune at
the same time may choose differently: tune before a run on several GPUs rather than in it.

`triton.autotune` does not replace this, because

- it always tunes, also inside of a step and while a CUDA graph is captured, by noisy times: two
  processes then sum in different orders, and a run cannot be repeated bit by bit;
- its key is exact: with Poisson sampling nearly each batch size would be tuned anew;
- a tile decides more than the kernel's own constants: the block shapes of the tensor descriptors,
  the table of a grouped launch, and how many partial sums there are. Block shapes need hooks, and
  configurations with hooks are not kept on disk;
- it refuses a launch that pins the tile, as `tile_size` does, and needs a GPU: neither the CPU nor
  Triton's interpreter, in which the kernels are tested, has a benchmark.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.cuda import is_current_stream_capturing  # the real one, also as in a capture

from dp_clipping.files import write_atomically
from dp_clipping.kernels.launch.tiles import INTERPRETED, Tile, default_tile, triton
from dp_clipping.torch_compat import spin

if triton is None:
    FAILURES: tuple[type[Exception], ...] = (RuntimeError,)
else:
    from triton.errors import TritonError

    # More shared memory than there is, or code that does not compile; passes of the compiler
    # raise the other.
    FAILURES = (TritonError, RuntimeError)

FILE = "tiles.json"
SWITCH = "DP_CLIPPING_TUNE"
BY_POINTERS = " by pointers"  # behind a kernel's name
ROUNDS = 5

Launch = Callable[[Tile], object]

TimedCall = Callable[[int], Any]

SAMPLE_MS = 1.0  # a sample lasts about this long, or one call
MOST_CALLS = 32  # of a sample: further launches would wait for a place in the queue
WARM_UP = 3  # calls whose times only say how many make a sample
LEAD = 1.5  # the spinning lasts that many times what the host takes
SPIN_RATE = 2e9  # cycles a second, no less than any clock
TRIES = 4  # of a sample that the host was not ahead of; the last one counts

_chosen: dict[tuple, Tile] = {}


def best(
    kernel: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    candidates: Sequence[Tile],
    run: Launch,
    device: torch.device,
) -> Tile:
    """Returns the tile for a launch.

    Args:
        kernel: its name, and what else than dtype and shape decides which tile is fastest.
        shape: dimensions that decide it too.
        candidates: the first is the default.
        run: launches the kernel with a tile; called again and again if the candidates are timed.
    """
    key = _key(kernel, dtype, shape, device)
    return _chosen.get(key) or _choose(key, candidates, run)


def best_for_pairs(
    kernel: str,
    operands: Any,
    tiles: Mapping[int, Sequence[Tile]],
    run: Launch,
) -> Tile:
    """Calls `best` for one launch over pairs [B, T, d] and [B, T, p] of one B and dtype.

    Args:
        operands: a `grouped_launch.Operands`.
        tiles: candidates by the bytes of an element; see `tiles.default_tile`.
    """
    left, _ = operands.pairs[0]
    tokens, shapes = max(operands.tokens), tuple(operands.shapes)
    candidates, key = _class_of(
        kernel if operands.described else kernel + BY_POINTERS, left.dtype, left.device,
        left.shape[0], tokens, shapes, tuple(tiles[left.element_size()]),
    )  # fmt: skip
    return _chosen.get(key) or _choose(key, candidates, run)


@lru_cache(maxsize=4096)
def _class_of(
    kernel: str, dtype: torch.dtype, device: torch.device, batch_size: int, tokens: int,
    shapes: tuple[tuple[int, int, int], ...], tiles: tuple[Tile, ...],
) -> tuple[tuple[Tile, ...], tuple]:  # fmt: skip
    """Returns the tiles for a launch, the default first, and its class."""
    default = default_tile(shapes, tiles)
    if default != tiles[0]:  # of one class of sizes not all have the same default
        kernel += f" in tiles of {default.rows} x {default.columns}"
    outputs, inputs = max(d for _, d, _ in shapes), max(p for _, _, p in shapes)
    key = _key(kernel, dtype, (len(shapes), batch_size, tokens, outputs, inputs), device)
    return (default, *[tile for tile in tiles if tile != default]), key


def _key(kernel: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> tuple:
    sizes = tuple([1 << (n - 1).bit_length() for n in shape])
    return kernel, dtype, sizes, device


def name_of(kernel: str, described: bool) -> str:
    """Returns a kernel's name with how it reads its operands."""
    return kernel if described else kernel + BY_POINTERS


def forget() -> None:
    """Clears the choices of this process; the file stays."""
    _chosen.clear()
    _saved.cache_clear()


def _choose(key: tuple, candidates: Sequence[Tile], run: Launch) -> Tile:
    """Returns the tile of a class that has none in this process."""
    kernel, dtype, sizes, device = key
    default = candidates[0]
    if INTERPRETED or device.type != "cuda" or torch.compiler.is_compiling():
        return default
    name = f"{kernel}, {str(dtype).removeprefix('torch.')}, {' x '.join(map(str, sizes))}"
    saved = _saved(device).get(name)
    tile = next((one for one in candidates if _written(one) == saved), None)
    if tile is None and os.environ.get(SWITCH) == "1":
        if is_current_stream_capturing():
            return default
        tile = _fastest(candidates, run, device)
        if tile is not None:
            keep(FILE, device, {name: _written(tile)})
    _chosen[key] = tile or default
    return _chosen[key]


def _written(tile: Tile) -> dict[str, int]:
    """Returns a tile as it is stored."""
    return dict(zip(("rows", "columns", "depth", "warps", "stages"), tile[:5], strict=True))


@lru_cache(maxsize=16)
def _saved(device: torch.device) -> dict:
    return read(FILE, device)


def _fastest(candidates: Sequence[Tile], run: Launch, device: torch.device) -> Tile | None:
    """Returns the fastest that runs at all, by the median of rounds in which they take turns."""
    calls = {tile: lambda _, tile=tile: run(tile) for tile in candidates if _runs(run, tile)}
    if not calls:
        return None
    samples = interleaved(calls, device, ROUNDS)
    return min(samples, key=lambda tile: median(samples[tile]))


def _runs(run: Launch, tile: Tile) -> bool:
    try:
        run(tile)
    except torch.OutOfMemoryError:
        raise  # the device is full: that says nothing of the tile
    except FAILURES:
        return False
    return True


# Calls are interleaved in rounds, so that a change of the clock affects all of them. A sample is a
# number of calls behind a kernel that only spins: the host runs ahead, and what is timed is the
# device, not Python. One that a busy host has fallen behind is taken again. Each call is given its
# number, by which it can choose its operands: those of the call before would still be in the
# second-level cache.


def interleaved(
    calls: Mapping[str, TimedCall], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Returns name -> milliseconds of one call, a sample a round; each second one backward.

    Each is called before, once to be compiled and then WARM_UP times. What a call returns is freed.
    """
    sizes = {name: _sample_size(call, device) for name, call in calls.items()}
    samples = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls) if number % 2 == 0 else list(reversed(calls))
        for name in names:
            samples[name].append(_sample(calls[name], *sizes[name], device))
    return samples


def _sample_size(call: TimedCall, device: torch.device) -> tuple[int, float]:
    """Returns how many calls make a sample, and how many seconds the host takes to launch one."""
    call(0)
    _wait(device)
    started = time.perf_counter()
    for number in range(WARM_UP):
        call(number)
    launched = time.perf_counter() - started
    _wait(device)
    elapsed = time.perf_counter() - started
    count = ceil(SAMPLE_MS * 1e-3 * WARM_UP / elapsed)
    return min(count, MOST_CALLS), launched / WARM_UP


def _sample(call: TimedCall, count: int, launch: float, device: torch.device) -> float:
    """Returns milliseconds of one call, the mean of `count` in a row."""
    if device.type != "cuda":
        started = time.perf_counter()
        for number in range(count):
            call(number)
        return (time.perf_counter() - started) * 1e3 / count
    lead = LEAD * launch * count
    for _ in range(TRIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spin(int(lead * SPIN_RATE))
        start.record()
        for number in range(count):
            call(number)
        end.record()
        was_ahead = not start.query()
        end.synchronize()
        if was_ahead:
            break
        lead *= 2  # other work has held the host up, and the device may have waited for it
    return start.elapsed_time(end) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def path_of(name: str) -> Path:
    """Returns the file that holds the values of all devices."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dp_clipping" / name


def key_of(device: torch.device) -> str:
    """Returns the key of a device's values: its name, and the versions of torch and triton."""
    version = None if triton is None else triton.__version__
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {version}"


def read(name: str, device: torch.device) -> dict:
    """Returns the values that are kept for a device."""
    return _object(_devices(name).get(key_of(device)))


def keep(name: str, device: torch.device, values: dict) -> None:
    """Stores this device's values beside those of other devices, or warns why it cannot."""
    devices, key = _devices(name), key_of(device)
    devices[key] = _object(devices.get(key)) | values
    try:
        path_of(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path_of(name), json.dumps(devices, indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"measured choices are not stored: {error}", stacklevel=2)


def _devices(name: str) -> dict:
    try:
        return _object(json.loads(path_of(name).read_bytes()))
    except (OSError, ValueError):
        return {}


def _object(content: object) -> dict:
    return content if isinstance(content, dict) else {}
