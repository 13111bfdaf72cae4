"""Which tile a matrix kernel takes: the fastest of its candidates, found once and kept.

A kernel's first candidate needs no tuning, but another may suit a shape or a GPU better. With
`DP_CLIPPING_TUNE=1` in the environment a kernel's first launch on a class of operands times all
candidates on these operands and takes the fastest; those that do not compile, or need more shared
memory than there is, are left out. A class is the kernel, how it reads (tensor descriptors or
pointers), the dtype, the number of layers in the launch, and the dimensions, each number rounded up
to a power of two: batches and lengths that vary fall into few classes. Each costs the compilation
of all candidates and a few launches of each.

What is found is kept in `tiles.json` beside the rates (see `cache` for the folder), by
device, torch and Triton, and later processes take it from there with or without the variable. They
read the file once; then a launch is one look in a dictionary. Deleting the file forgets all.
`tile_size` comes before any choice.

Neither tuned nor looked up: on the CPU, in Triton's interpreter, while `torch.compile` traces. Not
tuned, but a later launch is: while a CUDA graph is captured. Tiles differ in the order of their
sums, so a run before tuning and one after it may differ in the last bits. Processes that tune at
the same time may choose differently: tune before a run on several GPUs rather than in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor

from dp_clipping.kernels import INTERPRETED
from dp_clipping.kernels.tiles import Tile, triton
from dp_clipping.kernels.tuning import cache
from dp_clipping.kernels.tuning.timing import interleaved

if triton is None:
    FAILURES: tuple[type[Exception], ...] = (RuntimeError,)
else:
    from triton.errors import TritonError

    # More shared memory than there is, or code that does not compile; passes of the compiler
    # raise the other.
    FAILURES = (TritonError, RuntimeError)

FILE = "tiles.json"
SWITCH = "DP_CLIPPING_TUNE"
ROUNDS = 5

Launch = Callable[[Tile], object]

_chosen: dict[tuple, Tile] = {}


def best(
    kernel: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    candidates: Sequence[Tile],
    run: Launch,
    device: torch.device,
) -> Tile:
    """The tile for a launch.

    Args:
        kernel: its name, and what else than dtype and shape decides which tile is fastest.
        shape: dimensions that decide it too.
        candidates: the first is the default.
        run: launches the kernel with a tile; called again and again if the candidates are timed.
    """
    sizes = tuple([1 << (n - 1).bit_length() for n in shape])
    key = (kernel, dtype, sizes, device)
    return _chosen.get(key) or _choose(key, candidates, run)


def best_for_pairs(
    kernel: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    described: bool,
    tiles: Mapping[int, Sequence[Tile]],
    run: Launch,
) -> Tile:
    """`best` for one launch over pairs [B, T, d] and [B, T, p] of one B, T and dtype.

    Args:
        described: the bulk copy engine takes all operands.
        tiles: candidates by the bytes of an element.
    """
    left, _ = pairs[0]
    outputs, inputs = (max(pair[side].shape[2] for pair in pairs) for side in (0, 1))
    shape = (len(pairs), left.shape[0], left.shape[1], outputs, inputs)
    kernel = name_of(kernel, described)
    return best(kernel, left.dtype, shape, tiles[left.element_size()], run, left.device)


def name_of(kernel: str, described: bool) -> str:
    """Of a kernel by how it reads its operands."""
    return kernel if described else kernel + " by pointers"


def forget() -> None:
    """What this process remembers; the file stays."""
    _chosen.clear()
    _kept.cache_clear()


def _choose(key: tuple, candidates: Sequence[Tile], run: Launch) -> Tile:
    """The tile of a class that has none in this process."""
    kernel, dtype, sizes, device = key
    default = candidates[0]
    if INTERPRETED or device.type != "cuda" or torch.compiler.is_compiling():
        return default
    name = f"{kernel}, {str(dtype).removeprefix('torch.')}, {' x '.join(map(str, sizes))}"
    kept = _kept(device).get(name)
    tile = next((one for one in candidates if asdict(one) == kept), None)
    if tile is None and os.environ.get(SWITCH) == "1":
        if torch.cuda.is_current_stream_capturing():
            return default
        tile = _fastest(candidates, run, device)
        if tile is not None:
            cache.keep(FILE, device, {name: asdict(tile)})
    _chosen[key] = tile or default
    return _chosen[key]


@lru_cache(maxsize=16)
def _kept(device: torch.device) -> dict:
    return cache.read(FILE, device)


def _fastest(candidates: Sequence[Tile], run: Launch, device: torch.device) -> Tile | None:
    """Of those that run at all, by the median of a few rounds in which they take turns."""
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
