"""Adds the noise to clipped sums: by Triton kernels on a GPU, else by their reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place
from dp_clipping.noise import kernel as kernels
from dp_clipping.noise.gaussian import (
    CHUNK,
    GAUSSIAN,
    NoiseStream,
    Values,
    add_noise_plain,
    add_noise_to_short,
    check_offset,
)

SHORT = TOGETHER = 4 * CHUNK  # elements of a tensor, and of several, that get noise at once


def add_noise_to_all(
    totals: list[Tensor], streams: list[NoiseStream], *, std: float, divisor: float,
    dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
    table: kernels.StreamTable | None = None, values: Values = GAUSSIAN,
    earlier: Sequence[tuple[float, list[NoiseStream]]] = (),
) -> list[Tensor]:  # fmt: skip
    """Returns `(total + std·(z + Σ w·z')) / divisor` of each total, in few launches and in order.

    Computed in float32 and cast last. Element i of a total, counted in row-major order, gets z[i]
    of its stream, or that of its place in the parameter.

    Args:
        totals: any shapes and strides, float32 (or float64, for tests: then computed in float64 on
            the same z). Contiguous ones whose dtype stays are overwritten.
        std: standard deviation of the noise on a sum, σC or σC/√W for one of W shares; 0 adds
            nothing.
        divisor: the expected global batch size, a public constant.
        dtypes: the dtypes of the results.
        places: where each total lies in its parameter; None: it is the whole.
        table: where a CUDA graph that is captured reads the streams of whole parameters. It has
            none of earlier steps.
        values: how words become z; kernels make normal numbers alone.
        earlier: each w, and a stream of z' per total, if noise of earlier steps is added again.

    Returns:
        Contiguous tensors.

    Raises:
        ValueError: a 16-bit total (the noise would join a rounded sum), a negative or non-finite
            `std`, a `divisor` that is not positive and finite, a place of another number of
            elements, a dtype that is not floating point.
    """
    check_scales(std, divisor)
    for dtype in {total.dtype for total in totals} - {torch.float32, torch.float64}:
        raise ValueError(f"noise joins a float32 sum, before the cast; got {dtype}")
    for dtype in set(dtypes):
        if not dtype.is_floating_point:
            raise ValueError(f"noise in a {dtype} result would be cut off")
    places = [None] * len(totals) if places is None else places
    for total, place in zip(totals, places, strict=True):
        if place is not None:
            _check_place(total, place)
    totals = list(map(Tensor.contiguous, totals))
    results = [
        total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, dtype in zip(totals, dtypes, strict=True)
    ]
    alike: dict[tuple, list[int]] = {}
    for i, (total, dtype, place) in enumerate(zip(totals, dtypes, places, strict=True)):
        alike.setdefault((total.dtype, dtype, total.device, place is None), []).append(i)
    for (*_, are_whole), numbers in alike.items():
        sums, noisy = [totals[i] for i in numbers], [results[i] for i in numbers]
        own = [streams[i] for i in numbers]
        more = [(weight, [others[i] for i in numbers]) for weight, others in earlier]
        if std == 0:
            for total, result in zip(sums, noisy, strict=True):
                torch.div(total, divisor, out=result)
        elif values is GAUSSIAN and kernels.serves(sums[0]):
            with torch.cuda.device_of(sums[0]):
                if are_whole:
                    make = None if table is None else partial(table.take, numbers)
                    kernels.add_noise_to_all_kernel_launch(
                        sums, noisy, own, std, divisor, make, more
                    )
                else:
                    parts: list[Any] = [places[i] for i in numbers]
                    kernels.add_noise_to_parts_kernel_launch(
                        sums, noisy, own, parts, std, divisor, more
                    )
        elif are_whole and not more:
            _add_noise_plain_to_wholes(sums, noisy, own, std, divisor, values)
        else:
            for i, total, result, stream in zip(numbers, sums, noisy, own, strict=True):
                add_noise_plain(
                    total.view(-1), result.view(-1), stream, std, divisor, places[i], values,
                    [(weight, others[i]) for weight, others in earlier],
                )  # fmt: skip
    return results


def _add_noise_plain_to_wholes(
    totals: list[Tensor], results: list[Tensor], streams: list[NoiseStream], std: float,
    divisor: float, values: Values,
) -> None:  # fmt: skip
    """Adds noise to whole parameters of one dtype in PyTorch, to many short ones at a time."""
    short = []
    for i, total in enumerate(totals):
        if total.numel() > SHORT:
            flat, out = total.view(-1), results[i].view(-1)
            add_noise_plain(flat, out, streams[i], std, divisor, values=values)
        else:
            short.append(i)
    while short:
        size, some = 0, []
        while short and (size := size + totals[short[-1]].numel()) <= TOGETHER:
            some.append(short.pop())
        add_noise_to_short(
            [totals[i] for i in some], [results[i] for i in some], [streams[i] for i in some],
            std, divisor, values,
        )  # fmt: skip


def check_scales(std: float, divisor: float) -> None:
    """Raises ValueError for a standard deviation or a divisor out of range."""
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and not negative, got {std}")
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor must be finite and positive, got {divisor}")


def _check_place(total: Tensor, place: Place) -> None:
    """Raises ValueError unless the runs of a place are those of the total's elements, in order."""
    numel = 0
    for run in place:
        check_offset(run.offset)
        if run.local_start != numel:
            raise ValueError(f"{run} begins elsewhere than at element {numel} of its part")
        numel += run.numel
    if numel != total.numel():
        raise ValueError(f"the place has {numel} elements, the sum {total.numel()}")
