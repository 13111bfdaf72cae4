"""Adds the noise to clipped sums: by one Triton kernel on a GPU, else by its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
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


@torch.no_grad()
def add_noise(
    total: Tensor,
    stream: NoiseStream,
    *,
    std: float,
    divisor: float = 1.0,
    dtype: torch.dtype | None = None,
    offset: int = 0,
    place: Place | None = None,
    out: Tensor | None = None,
    values: Values = GAUSSIAN,
    earlier: Sequence[tuple[float, NoiseStream]] = (),
) -> Tensor:
    """Returns `(total + std·(z + Σ w·z')) / divisor`, computed in float32 and cast to `dtype` last.

    Args:
        total: any shape and strides, float32 (or float64, for tests: then computed in float64 on
            the same z). Its element i, counted in row-major order, gets z[offset + i].
        std: standard deviation of the noise on the sum, σC or σC/√W for one of W shares; 0 adds
            nothing.
        divisor: the expected global batch size, a public constant.
        dtype: the dtype of the result; default that of `out`, or of `total`.
        offset: where this slice starts in the parameter's noise, in elements.
        place: where the elements of `total` lie in the parameter, instead of `offset`: each gets
            the noise of its place there. None: from `offset` on.
        values: how words become z; kernels make normal numbers alone.
        earlier: each w, and the stream of its z', if noise of earlier steps is added again.
        out: receives the result if given; same shape and device, may be `total` itself.

    Returns:
        `out`, or a new contiguous tensor of `total`'s shape.

    Raises:
        ValueError: a 16-bit `total` (the noise would join a rounded sum), a negative or
            non-finite `std`, a `divisor` that is not positive and finite, a negative `offset`, a
            `place` of another number of elements, an `out` of another shape, device or dtype, a
            `dtype` that is not floating point.
    """
    _check(total, std, divisor, dtype, offset, out)
    _check_place(total, place, offset)
    if out is None:
        out = torch.empty(total.shape, dtype=dtype or total.dtype, device=total.device)
    target = (
        out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    flat_total, flat_target = total.contiguous().view(-1), target.view(-1)
    if values is not GAUSSIAN or not kernels.serves(total):
        add_noise_plain(
            flat_total, flat_target, stream, std, divisor, offset, place, values, earlier
        )
    elif std == 0 or (place is None and not earlier):
        with torch.cuda.device_of(flat_total):
            kernels.add_noise_kernel_launch(flat_total, flat_target, stream, std, divisor, offset)
    else:
        n = total.numel()
        place = (Span(0, offset, n, n, 1),) if place is None else place
        with torch.cuda.device_of(flat_total):
            kernels.add_noise_to_parts_kernel_launch(
                [flat_total], [flat_target], [stream], [place], std, divisor,
                [(weight, [other]) for weight, other in earlier],
            )  # fmt: skip
    return out if target is out else out.copy_(target)


def add_noise_to_all(
    totals: list[Tensor], streams: list[NoiseStream], *, std: float, divisor: float,
    dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
    table: kernels.StreamTable | None = None, values: Values = GAUSSIAN,
    earlier: Sequence[tuple[float, list[NoiseStream]]] = (),
) -> list[Tensor]:  # fmt: skip
    """Returns `add_noise` of each total with its stream, in few launches and in order.

    Args:
        totals: float32, any shapes; kernels overwrite those whose dtype stays.
        dtypes: the dtypes of the results.
        places: where each total lies in its parameter; None: it is the whole.
        values: how words become z.
        table: where a CUDA graph that is captured reads the streams of whole parameters. It has
            none of earlier steps.
        earlier: each w, and a stream of z' per total.
    """
    is_whole = places is None
    places = [None] * len(totals) if places is None else places
    served = values is GAUSSIAN and {(x.is_cuda, x.dtype): x for x in totals}
    if std == 0 or not served or not all(map(kernels.serves, served.values())):
        if is_whole and not earlier and std > 0:
            return _add_noise_plain_to_all(totals, streams, std, divisor, dtypes, values)
        return [
            add_noise(
                total,
                stream,
                std=std,
                divisor=divisor,
                dtype=dtype,
                place=place,
                values=values,
                earlier=[(weight, others[i]) for weight, others in earlier],
            )
            for i, (total, stream, dtype, place) in enumerate(
                zip(totals, streams, dtypes, places, strict=True)
            )
        ]
    check_scales(std, divisor)
    for dtype in set(dtypes):
        _check_dtype(dtype)
    totals = list(map(Tensor.contiguous, totals))
    results = [
        total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, dtype in zip(totals, dtypes, strict=True)
    ]
    for total, place in zip(totals, places, strict=True):
        if place is not None:
            _check_place(total, place, 0)
    alike: dict[tuple, list[int]] = {}
    for i, (result, place) in enumerate(zip(results, places, strict=True)):
        alike.setdefault((result.dtype, result.device, place is None), []).append(i)
    for (*_, are_whole), numbers in alike.items():
        sums, noisy = [totals[i] for i in numbers], [results[i] for i in numbers]
        own: list[kernels.Stream] = [streams[i] for i in numbers]
        more = [(weight, [others[i] for i in numbers]) for weight, others in earlier]
        with torch.cuda.device_of(sums[0]):
            if are_whole:
                make = None if table is None else partial(table.take, numbers)
                kernels.add_noise_to_all_kernel_launch(sums, noisy, own, std, divisor, make, more)
            else:
                parts: list[Any] = [places[i] for i in numbers]
                kernels.add_noise_to_parts_kernel_launch(
                    sums, noisy, own, parts, std, divisor, more
                )
    return results


def _add_noise_plain_to_all(
    totals: list[Tensor], streams: list[NoiseStream], std: float, divisor: float,
    dtypes: list[torch.dtype], values: Values,
) -> list[Tensor]:  # fmt: skip
    """Returns `add_noise_to_all` of whole parameters in PyTorch, of many short ones at a time."""
    check_scales(std, divisor)
    for dtype in set(dtypes):
        _check_dtype(dtype)
    for dtype in {total.dtype for total in totals}:
        _check_sum(dtype)
    totals = [total.contiguous() for total in totals]
    results = [
        torch.empty_like(total, dtype=dtype) for total, dtype in zip(totals, dtypes, strict=True)
    ]
    alike: dict[tuple, list[int]] = {}
    for i, total in enumerate(totals):
        if total.numel() > SHORT:
            flat, out = total.view(-1), results[i].view(-1)
            add_noise_plain(flat, out, streams[i], std, divisor, 0, values=values)
        else:
            alike.setdefault((total.dtype, total.device), []).append(i)
    for numbers in alike.values():
        while numbers:
            size, some = 0, []
            while numbers and (size := size + totals[numbers[-1]].numel()) <= TOGETHER:
                some.append(numbers.pop())
            add_noise_to_short(
                [totals[i] for i in some], [results[i] for i in some], [streams[i] for i in some],
                std, divisor, values,
            )  # fmt: skip
    return results


def _check(
    total: Tensor, std: float, divisor: float, dtype: torch.dtype | None, offset: int,
    out: Tensor | None,
) -> None:  # fmt: skip
    _check_sum(total.dtype)
    check_scales(std, divisor)
    check_offset(offset)
    if out is not None and (out.shape, out.device) != (total.shape, total.device):
        raise ValueError(
            f"out is {tuple(out.shape)} on {out.device}, "
            f"the sum {tuple(total.shape)} on {total.device}"
        )
    if out is not None and dtype not in (None, out.dtype):
        raise ValueError(f"dtype is {dtype}, but that of out is {out.dtype}")
    _check_dtype(out.dtype if out is not None else dtype)


def _check_sum(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"noise joins a float32 sum, before the cast; got {dtype}")


def check_scales(std: float, divisor: float) -> None:
    """Raises ValueError for a standard deviation or a divisor out of range."""
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and not negative, got {std}")
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor must be finite and positive, got {divisor}")


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"noise in a {dtype} result would be cut off")


def _check_place(total: Tensor, place: Place | None, offset: int) -> None:
    if place is None:
        return
    if offset:
        raise ValueError(f"give a place in the parameter or an offset, not both (got {offset})")
    numel = 0
    for run in place:
        check_offset(run.offset)
        if run.local_start != numel:
            raise ValueError(f"{run} begins elsewhere than at element {numel} of its part")
        numel += run.numel
    if numel != total.numel():
        raise ValueError(f"the place has {numel} elements, the sum {total.numel()}")
