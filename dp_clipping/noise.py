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

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dp_clipping.kernels import noise as kernels

SECRET_BYTES = 32
WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # golden ratio and √3 − 1, as in the paper
CHUNK = 1 << 15  # counters drawn at once: six int64 words each still fit the second-level cache


@dataclass(frozen=True)
class NoiseStream:
    """One stream of 2⁶⁶ values: Philox's two key words and the high half of its counter, each
    below 2³². The words are as secret as the key that they come from, and are not printed."""

    key_0: int = field(repr=False)
    key_1: int = field(repr=False)
    counter_2: int = field(repr=False)
    counter_3: int = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, *, step: int, parameter: str, share: int) -> NoiseStream:
        """The stream of one parameter in one step: 128 bits of BLAKE2b keyed with `secret`.

        Args:
            secret: 32 bytes from the operating system's entropy.
            step: the optimizer step, at least 0.
            parameter: its full name, the same on every rank.
            share: which of the data-parallel shares of the noise, 0 where there is one.

        Raises:
            ValueError: `secret` of another length, or a negative `step` or `share`.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the noise key has {len(secret)} bytes, expected {SECRET_BYTES}")
        if step < 0 or share < 0:
            raise ValueError(f"step and share must not be negative, got {step} and {share}")
        # Fixed widths first and the name last, so that no two messages are equal.
        message = step.to_bytes(8, "little") + share.to_bytes(8, "little") + parameter.encode()
        digest = hashlib.blake2b(message, digest_size=16, key=secret, person=b"noise").digest()
        return cls(*(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)))


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
    out: Tensor | None = None,
) -> Tensor:
    """`(total + std·z) / divisor`, computed in float32 and cast to `dtype` last.

    Args:
        total: any shape and strides, float32 (or float64, for tests: then computed in float64 on
            the same z). Its element i, counted in row-major order, gets z[offset + i].
        std: standard deviation of the noise on the sum, σC or σC/√W for one of W shares; 0 draws
            nothing.
        divisor: the expected global batch size, a public constant.
        dtype: of the result; default that of `out`, or of `total`.
        offset: where this slice starts in the parameter's noise, in elements.
        out: receives the result if given; same shape and device, may be `total` itself.

    Returns:
        `out`, or a new contiguous tensor of `total`'s shape.

    Raises:
        ValueError: a 16-bit `total` (the noise would join a rounded sum), a negative or
            non-finite `std`, a `divisor` that is not positive and finite, a negative `offset`, an
            `out` of another shape, device or dtype, a `dtype` that is not floating point.
    """
    _check(total, std, divisor, dtype, offset, out)
    if out is None:
        out = torch.empty(total.shape, dtype=dtype or total.dtype, device=total.device)
    target = (
        out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    flat_total, flat_target = total.contiguous().view(-1), target.view(-1)
    if kernels.serves(total):
        with torch.cuda.device_of(flat_total):
            kernels.add_noise_kernel_launch(flat_total, flat_target, stream, std, divisor, offset)
    else:
        add_noise_plain(flat_total, flat_target, stream, std, divisor, offset)
    return out if target is out else out.copy_(target)


@torch.no_grad()
def add_noise_to_all(
    totals: list[Tensor], streams: list[NoiseStream], *, std: float, divisor: float,
    dtypes: list[torch.dtype],
) -> list[Tensor]:  # fmt: skip
    """`add_noise` of each total with its stream, in few launches: the results in order.

    Args:
        totals: float32, any shapes; those whose dtype stays are overwritten.
        dtypes: of the results.
    """
    if std == 0 or not all(kernels.serves(total) for total in totals):
        return [
            add_noise(total, stream, std=std, divisor=divisor, dtype=dtype)
            for total, stream, dtype in zip(totals, streams, dtypes, strict=True)
        ]
    totals = [total.contiguous() for total in totals]
    results = [
        total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, dtype in zip(totals, dtypes, strict=True)
    ]
    for total, result, dtype in zip(totals, results, dtypes, strict=True):
        _check(total, std, divisor, dtype, 0, result)
    for place in dict.fromkeys((result.dtype, result.device) for result in results):
        own = [i for i, result in enumerate(results) if (result.dtype, result.device) == place]
        with torch.cuda.device_of(totals[own[0]]):
            kernels.add_noise_to_all_kernel_launch(
                [totals[i] for i in own], [results[i] for i in own], [streams[i] for i in own],
                std, divisor,
            )  # fmt: skip
    return results


def add_noise_plain(
    total: Tensor, out: Tensor, stream: NoiseStream, std: float, divisor: float, offset: int
) -> None:
    """`out ← (total + std·z) / divisor` for contiguous `total` and `out` of shape [n]."""
    if std == 0:
        torch.div(total, divisor, out=out)
        return
    for part, z in _chunks(total.numel(), stream, offset, total.device):
        noisy = z.to(total.dtype).mul_(std).add_(total[part])
        torch.div(noisy, divisor, out=out[part])


def philox(counters: Tensor, stream: NoiseStream) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of the 128-bit counters (`counters` low, the stream's words high).

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


def _box_muller(words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Four normals a counter, [4n] float32, those of one counter next to each other.

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


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise ValueError(f"the offset into the noise must not be negative, got {offset}")
