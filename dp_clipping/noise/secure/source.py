"""The source of secure noise: sums are rounded to a grid, and get integers of it.

    n = round(sum / g)     k = round(s·x), x ~ N(0, 1)     result = (n + k)·g / divisor

g is a power of two, so that sum / g and (n + k)·g are exact in float64, and s = σC / g. The result
is a function of the integer n + k alone: no bit of it tells more of the sum than n + k does.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.kernels.launch.tiles import triton
from dp_clipping.noise.add_noise import check_scales
from dp_clipping.noise.gaussian import digests_of
from dp_clipping.noise.kernel import StreamTable
from dp_clipping.noise.secure.certificate import grid_of
from dp_clipping.noise.secure.kernel import add_integers_kernel_launch
from dp_clipping.noise.secure.rounded_gaussian import CHUNK, rounded, values_at

LARGEST = 2.0**51  # of |sum / g|, to which it is limited: far above what norms allow


class SecureNoise:
    """Adds integers of a grid to sums rounded to it: see `PrivacyEngine(secure_mode=True)`.

    Args:
        dimension: d, the number of elements of all parameters on all ranks.
    """

    spans_steps = False

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def add(
        self, totals: list[Tensor], parameters: Sequence[str], *, key: bytes, step: int, std: float,
        divisor: float, dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
        table: StreamTable | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Returns (grid·(round(total / grid) + integer)) / divisor of each total, cast last.

        The integer of an element is a function of the key, the step, the parameter and the
        element's place in it alone. Without noise (`std` 0) nothing is rounded to a grid.

        Raises:
            ValueError: for sums that are not float32, or a `table` for a CUDA graph.
        """
        if table is not None:
            raise ValueError(
                "secure_mode=True draws no noise in a CUDA graph: leave out cuda_graph"
            )
        for total in totals:
            if total.dtype != torch.float32:
                raise ValueError(
                    f"secure_mode=True adds noise to float32 sums, not {total.dtype}: convert the "
                    "network, as network.float(), before make_private"
                )
        if std == 0:
            return [
                torch.div(total, divisor).to(dtype)
                for total, dtype in zip(totals, dtypes, strict=True)
            ]
        check_scales(std, divisor)
        places = [None] * len(totals) if places is None else places
        keys = stream_keys(key, step, parameters)
        grid = grid_of(std, self.dimension)
        totals = [total.contiguous() for total in totals]
        results = [
            total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
            for total, dtype in zip(totals, dtypes, strict=True)
        ]
        kinds = [(result.dtype, result.device) for result in results]
        for kind in dict.fromkeys(kinds):
            own = [i for i, other in enumerate(kinds) if other == kind]
            _add(
                [totals[i] for i in own], [results[i] for i in own], [keys[i] for i in own],
                [places[i] for i in own], grid, std / grid, divisor,
            )  # fmt: skip
        return results


def stream_keys(secret: bytes, step: int, parameters: Sequence[str]) -> list[bytes]:
    """Returns the ChaCha20 key of each parameter's noise in a step: BLAKE2b keyed with `secret`.

    Value number i of the stream is in group i // 16, made of blocks 3(i // 16) to 3(i // 16) + 2.

    Args:
        secret: the noise key of the run, 32 bytes.
        step: the optimizer step, at least 0.
        parameters: their full names, the same on every rank.
    """
    return digests_of(secret, step.to_bytes(8, "little"), parameters, 32, b"secure noise")


def _add(
    totals: list[Tensor], outs: list[Tensor], keys: list[bytes], places: list[Place | None],
    grid: float, scale: float, divisor: float,
) -> None:  # fmt: skip
    """Adds the noise to sums of one dtype on one device, by the kernel or its reference."""
    if triton is not None and totals[0].is_cuda:  # float64 too
        with torch.cuda.device_of(totals[0]):
            add_integers_kernel_launch(totals, outs, keys, places, grid, scale, divisor)
        return
    for total, out, key, place in zip(totals, outs, keys, places, strict=True):
        add_plain(total, out, key, place, grid, scale, divisor)


def add_plain(
    total: Tensor, out: Tensor, key: bytes, place: Place | None, grid: float, scale: float,
    divisor: float,
) -> None:  # fmt: skip
    """Writes `out ← (round(total / grid) + integer) · (grid / divisor)`, cast last."""
    flat, target, n = total.view(-1), out.view(-1), total.numel()
    for run in (Span(0, 0, n, n, 1),) if place is None else place:
        for begin in range(0, run.numel, CHUNK):
            number = np.arange(begin, min(begin + CHUNK, run.numel))
            offsets = run.offset + number // run.length * run.stride + number % run.length
            part = slice(run.local_start + begin, run.local_start + begin + len(number))
            units = np.clip(flat[part].double().cpu().numpy() * (1 / grid), -LARGEST, LARGEST)
            noisy = (rounded(units) + values_at(key, offsets, scale)) * (grid / divisor)
            target[part] = torch.from_numpy(noisy).float()
