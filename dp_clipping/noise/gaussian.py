"""The Gaussian noise of DP-SGD, as streams in which every value has an address.

Value number `offset` of a stream is a function of (secret, step, parameter, share, offset) and of
nothing else: no state, no global seed, no rank. So a shard draws its own slice of the noise that
one process would draw, replicas draw the same, and a resumed run draws what it would have drawn.

The streams are counter-based, not cryptographic: Philox was designed to pass statistical tests,
and whoever sees exact values may work back to its key. Attacks on the floating-point grid of the
noise are out of scope (I. Mironov, On significance of the least significant bits for differential
privacy, 2012; N. Holohan and S. Braghin, Secure random sampling in differential privacy, 2021).

Sources: M. Abadi et al., Deep learning with differential privacy (2016), for the mechanism;
J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), for Philox4x32-10;
G. Box and M. Muller, A note on the generation of random normal deviates (1958).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dp_clipping.noise import kernel as kernels
from dp_clipping.noise.stream import NoiseStream

if TYPE_CHECKING:
    from dp_clipping.distributed.placement import Place, Span

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # golden ratio and √3 − 1, as in the paper
CHUNK = 1 << 15  # counters drawn at once: six int64 words each still fit the second-level cache


def standard_normal(
    numel: int, stream: NoiseStream, *, offset: int = 0, device: torch.device | str
) -> Tensor:
    """Values `offset` to `offset + numel` of the stream: [numel], float32, N(0, 1).

    The bits depend on the device's logarithm and cosine (a CPU and a GPU agree to about 1e-6) but
    not on how a range is cut. No value exceeds √(66 ln 2) = 6.77 in magnitude; a true normal does
    so once in 10¹¹.

    Raises:
        ValueError: a negative `offset`.
    """
    _check_offset(offset)
    z = torch.empty(numel, dtype=torch.float32, device=device)
    for part, values in _chunks(numel, stream, offset, device):
        z[part] = values
    return z


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
) -> Tensor:
    """Returns `(total + std·z) / divisor`, computed in float32 and cast to `dtype` last.

    Args:
        total: any shape and strides, float32 (or float64, for tests: then computed in float64 on
            the same z). Its element i, counted in row-major order, gets z[offset + i].
        std: standard deviation of the noise on the sum, σC or σC/√W for one of W shares; 0 draws
            nothing.
        divisor: the expected global batch size, a public constant.
        dtype: of the result; default that of `out`, or of `total`.
        offset: where this slice starts in the parameter's noise, in elements.
        place: where the elements of `total` lie in the parameter, instead of `offset`: each gets
            the noise of its place there. None: from `offset` on.
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
    if not kernels.serves(total):
        add_noise_plain(flat_total, flat_target, stream, std, divisor, offset, place)
    elif place is None or std == 0:
        with torch.cuda.device_of(flat_total):
            kernels.add_noise_kernel_launch(flat_total, flat_target, stream, std, divisor, offset)
    else:
        with torch.cuda.device_of(flat_total):
            kernels.add_noise_to_parts_kernel_launch(
                [flat_total], [flat_target], [stream], [place], std, divisor
            )
    return out if target is out else out.copy_(target)


@torch.no_grad()
def add_noise_to_all(
    totals: list[Tensor], streams: list[NoiseStream], *, std: float, divisor: float,
    dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns `add_noise` of each total with its stream, in order and in few launches.

    Args:
        totals: float32, any shapes; those whose dtype stays are overwritten.
        dtypes: of the results.
        places: where each total lies in its parameter; None: it is the whole.
    """
    places = [None] * len(totals) if places is None else places
    if std == 0 or not all(kernels.serves(total) for total in totals):
        return [
            add_noise(total, stream, std=std, divisor=divisor, dtype=dtype, place=place)
            for total, stream, dtype, place in zip(totals, streams, dtypes, places, strict=True)
        ]
    totals = [total.contiguous() for total in totals]
    results = [
        total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, dtype in zip(totals, dtypes, strict=True)
    ]
    for total, result, dtype, place in zip(totals, results, dtypes, places, strict=True):
        _check(total, std, divisor, dtype, 0, result)
        _check_place(total, place, 0)
    kinds = [
        (result.dtype, result.device, place is None)
        for result, place in zip(results, places, strict=True)
    ]
    for kind in dict.fromkeys(kinds):
        own = [i for i, other in enumerate(kinds) if other == kind]
        of_kind = [[each[i] for i in own] for each in (totals, results, streams)]
        with torch.cuda.device_of(totals[own[0]]):
            if kind[2]:
                kernels.add_noise_to_all_kernel_launch(*of_kind, std, divisor)
            else:
                kernels.add_noise_to_parts_kernel_launch(
                    *of_kind, [places[i] for i in own], std, divisor
                )
    return results


def add_noise_plain(
    total: Tensor, out: Tensor, stream: NoiseStream, std: float, divisor: float, offset: int,
    place: Place | None = None,
) -> None:  # fmt: skip
    """Writes `out ← (total + std·z) / divisor` for contiguous `total` and `out` of shape [n]."""
    if std == 0:
        torch.div(total, divisor, out=out)
        return
    device = total.device
    drawn = (
        _chunks(total.numel(), stream, offset, device)
        if place is None
        else (piece for run in place for piece in _chunks_of_run(run, stream, device))
    )
    for part, z in drawn:
        noisy = z.to(total.dtype).mul_(std).add_(total[part])
        torch.div(noisy, divisor, out=out[part])


def philox(counters: Tensor, stream: NoiseStream) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns Philox4x32-10 of 128-bit counters (`counters` low, the stream's words high).

    Args:
        counters: [n], int64, read as 64 unsigned bits.

    Returns:
        four tensors [n] of int64 in [0, 2³²).
    """
    # A product of two 32-bit words wraps in int64, but all of its 64 bits are right. Its low half
    # is left with the high half above it until it meets the next mask, which saves two passes.
    x0, x1 = counters & WORD, counters >> 32
    x2, x3 = torch.full_like(x0, stream.counter_2), torch.full_like(x0, stream.counter_3)
    k0, k1 = stream.key_0, stream.key_1
    p0, p1 = torch.empty_like(x0), torch.empty_like(x0)
    for _ in range(ROUNDS):
        torch.mul(x0, MULTIPLIERS[0], out=p0)
        torch.mul(x2, MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=x0).bitwise_xor_(x1).bitwise_xor_(k0)
        torch.bitwise_right_shift(p0, 32, out=x2).bitwise_xor_(x3).bitwise_xor_(k1)
        x0.bitwise_and_(WORD)
        x2.bitwise_and_(WORD)
        x1, p1 = p1, x1
        x3, p0 = p0, x3
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return x0, x1.bitwise_and_(WORD), x2, x3.bitwise_and_(WORD)


def _chunks(
    numel: int, stream: NoiseStream, offset: int, device: torch.device | str
) -> Iterator[tuple[slice, Tensor]]:
    """Pairs (where in [0, numel), its values [at most 4·CHUNK]), in order."""
    first, last = offset // 4, (offset + numel + 3) // 4
    for begin in range(first, last, CHUNK):
        counters = torch.arange(begin, min(begin + CHUNK, last), device=device)
        start = 4 * begin - offset  # negative where the first counter has values before the slice
        values = _box_muller(philox(counters, stream))[max(0, -start) : numel - start]
        start = max(0, start)
        yield slice(start, start + values.numel()), values


def _chunks_of_run(
    run: Span, stream: NoiseStream, device: torch.device | str
) -> Iterator[tuple[slice, Tensor]]:
    """Yields `_chunks` for a run: pairs (where in the part, its values), in order."""
    if run.count == 1 or run.length > 4 * CHUNK:
        for q in range(run.count):
            start = run.local_start + q * run.length
            for part, values in _chunks(run.length, stream, run.offset + q * run.stride, device):
                yield slice(start + part.start, start + part.stop), values
        return
    width = (run.length + 6) // 4  # counters of a row, whichever of four values it begins with
    rows = max(1, CHUNK // width)
    lanes = torch.arange(run.length, device=device)
    for q in range(0, run.count, rows):
        number = torch.arange(q, min(q + rows, run.count), device=device)
        starts = number * run.stride + run.offset
        counters = starts.div(4, rounding_mode="floor")[:, None]
        counters = counters + torch.arange(width, device=device)
        values = _box_muller(philox(counters.view(-1), stream)).view(len(starts), -1)
        values = values.gather(1, (starts % 4)[:, None] + lanes).view(-1)
        start = run.local_start + q * run.length
        yield slice(start, start + values.numel()), values


def _box_muller(words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Returns four normals a counter, [4n] float32, those of one counter next to each other.

    The uniform number under the logarithm is (w + ½)/2³² in (0, 1], the angle w read as a signed
    integer times π/2³¹ in [−π, π). It is float64: rounding it to float32 would move it by up to
    3e-7, several times as much as rounding moves a cosine.
    """
    z = torch.empty(words[0].numel(), 4, dtype=torch.float32, device=words[0].device)
    for i in (0, 2):
        uniform = words[i].to(torch.float32).mul_(2**-32).add_(2**-33)
        radius = uniform.log_().mul_(-2).sqrt_()
        angle = words[i + 1].to(torch.int32).to(torch.float64).mul_(math.pi * 2**-31)
        torch.mul(radius, angle.cos().float(), out=z[:, i])
        torch.mul(radius, angle.sin_().float(), out=z[:, i + 1])
    return z.view(-1)


def _check(
    total: Tensor, std: float, divisor: float, dtype: torch.dtype | None, offset: int,
    out: Tensor | None,
) -> None:  # fmt: skip
    if total.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"noise joins a float32 sum, before the cast; got {total.dtype}")
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and not negative, got {std}")
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor must be finite and positive, got {divisor}")
    _check_offset(offset)
    if out is not None and (out.shape, out.device) != (total.shape, total.device):
        raise ValueError(
            f"out is {tuple(out.shape)} on {out.device}, "
            f"the sum {tuple(total.shape)} on {total.device}"
        )
    if out is not None and dtype not in (None, out.dtype):
        raise ValueError(f"dtype is {dtype}, but that of out is {out.dtype}")
    dtype = out.dtype if out is not None else dtype
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"noise in a {dtype} result would be cut off")


def _check_place(total: Tensor, place: Place | None, offset: int) -> None:
    if place is None:
        return
    if offset:
        raise ValueError(f"give a place in the parameter or an offset, not both (got {offset})")
    numel = 0
    for run in place:
        _check_offset(run.offset)
        if run.local_start != numel:
            raise ValueError(f"{run} begins elsewhere than at element {numel} of its part")
        numel += run.numel
    if numel != total.numel():
        raise ValueError(f"the place has {numel} elements, the sum {total.numel()}")


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise ValueError(f"the offset into the noise must not be negative, got {offset}")
