"""Which tile a matrix kernel takes: the fastest of its candidates, measured once and kept.

A kernel's first candidate needs no tuning, but another may suit a shape or a GPU better. With
`DP_CLIPPING_TUNE=1` in the environment a kernel's first launch on a class of operands times all
candidates on these operands and takes the fastest; those that do not compile, or need more shared
memory than there is, are left out. A class is the kernel, how it reads (tensor descriptors or
pointers), the dtype, the number of layers in the launch, and the dimensions, each number rounded up
to a power of two: batches and lengths that vary fall into few classes. Each costs the compilation
of all candidates and a few launches of each.

Measurements are kept in files in `$XDG_CACHE_HOME/dp_clipping` (`~/.cache/dp_clipping` without that
variable), by device, torch and Triton: tiles in `tiles.json`, rates (`planning.calibration`) in
`rates.json`. A file that cannot be read, or that holds something else, counts as none. Later
processes read the tiles once, with or without the variable; then a launch is one look in a
dictionary. Deleting the file forgets all. `tile_size` comes before any choice.

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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from dp_clipping.files import write_atomically
from dp_clipping.kernels.tiles import INTERPRETED, Tile, triton
from dp_clipping.kernels.timing import interleaved

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
    """Returns the tile for a launch.

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
    """Returns a kernel's name with how it reads its operands."""
    return kernel if described else kernel + " by pointers"


def forget() -> None:
    """Forgets what this process remembers; the file stays."""
    _chosen.clear()
    _kept.cache_clear()


def _choose(key: tuple, candidates: Sequence[Tile], run: Launch) -> Tile:
    """Returns the tile of a class that has none in this process."""
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
            keep(FILE, device, {name: asdict(tile)})
    _chosen[key] = tile or default
    return _chosen[key]


@lru_cache(maxsize=16)
def _kept(device: torch.device) -> dict:
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


# ---- files ---------------------------------------------------------------------------------------


def path_of(name: str) -> Path:
    """Returns the file that holds the values of all devices."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dp_clipping" / name


def key_of(device: torch.device) -> str:
    """Returns what the values of a device depend on."""
    version = None if triton is None else triton.__version__
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {version}"


def read(name: str, device: torch.device) -> dict:
    """Returns the values that are kept for a device."""
    return _object(_devices(name).get(key_of(device)))


def keep(name: str, device: torch.device, values: dict) -> None:
    """Writes values beside those of other devices, or warns why it cannot."""
    devices, key = _devices(name), key_of(device)
    devices[key] = _object(devices.get(key)) | values
    try:
        path_of(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path_of(name), json.dumps(devices, indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"what was measured is not kept: {error}", stacklevel=2)


def _devices(name: str) -> dict:
    try:
        return _object(json.loads(path_of(name).read_bytes()))
    except (OSError, ValueError):
        return {}


def _object(content: object) -> dict:
    return content if isinstance(content, dict) else {}
