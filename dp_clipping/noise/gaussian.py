"""Defines the Gaussian noise of DP-SGD as streams in which every value has an address.

Value number `offset` of a stream is a function of (secret, step, parameter, share, offset) and of
nothing else: no state, no global seed, no rank. So a shard generates its own slice of the
noise of one process, replicas generate the same, and a resumed run continues as if never stopped.

The streams are counter-based, not cryptographic: Philox was designed to pass statistical tests,
and whoever sees exact values may work back to its key. Attacks on the floating-point grid of the
noise are out of scope (I. Mironov, On significance of the least significant bits for differential
privacy, 2012; N. Holohan and S. Braghin, Secure random sampling in differential privacy, 2021).
`noise.secure` withstands both.

Sources: M. Abadi et al., Deep learning with differential privacy (2016), for the mechanism;
J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), for Philox4x32-10;
G. Box and M. Muller, A note on the generation of random normal deviates (1958).
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.kernels.launch.tiles import triton
from dp_clipping.torch_compat import copy_each

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # golden ratio and √3 − 1, as in the paper
CHUNK = 1 << 15  # counters taken at once: six int64 words each still fit the second-level cache
ROW = 128  # numbers of one stream that are made together where many streams are
words_of = struct.Struct("<4I").iter_unpack


class NoiseStream(NamedTuple):
    """The address of one parameter's noise in one step: a stream of 2⁶⁶ values.

    `GradientNoise` derives those of all parameters in each step and gives them to
    `add_noise_to_all`; an adaptive threshold derives one per step for its counts. Nothing is stored
    between steps.

    Attributes:
        key_0, key_1: Philox's key words, each below 2³².
        counter_2, counter_3: the high half of its counter. All are as secret as the key that they
            are derived from, and are not printed.
    """

    key_0: int
    key_1: int
    counter_2: int
    counter_3: int

    def __repr__(self) -> str:
        return "NoiseStream()"

    @classmethod
    def derive(cls, secret: bytes, *, step: int, parameter: str, share: int) -> NoiseStream:
        """Returns the stream of one parameter: see `derive_all`."""
        return cls.derive_all(secret, step=step, parameters=[parameter], share=share)[0]

    @classmethod
    def derive_all(
        cls, secret: bytes, *, step: int, parameters: Iterable[str], share: int
    ) -> list[NoiseStream]:
        """Returns each parameter's stream in a step: 128 bits of BLAKE2b keyed with `secret`.

        Args:
            secret: 32 bytes from the operating system's entropy.
            step: the optimizer step, at least 0.
            parameters: their full names, the same on every rank.
            share: which of the data-parallel shares of the noise, 0 where there is one.
        """
        # Fixed widths first and the name last, so that no two messages are equal.
        start = step.to_bytes(8, "little") + share.to_bytes(8, "little")
        digests = digests_of(secret, start, parameters, 16, b"noise")
        # The words of all at once, and no constructor in Python: a network has hundreds.
        return [tuple.__new__(cls, words) for words in words_of(b"".join(digests))]


def digests_of(
    secret: bytes, start: bytes, parameters: Iterable[str], size: int, person: bytes
) -> list[bytes]:
    """Returns `size` bytes of BLAKE2b keyed with `secret`, of `start` and each parameter's name."""
    common = hashlib.blake2b(start, digest_size=size, key=secret, person=person)
    digests = []
    for parameter in parameters:
        own = common.copy()
        own.update(parameter.encode())
        digests.append(own.digest())
    return digests


def serves(total: Tensor) -> bool:
    """Returns whether `kernel`, and not this reference, adds the noise to `total`."""
    return triton is not None and total.is_cuda and total.dtype == torch.float32


def standard_normal(
    numel: int, stream: NoiseStream, *, offset: int = 0, device: torch.device | str
) -> Tensor:
    """Returns values `offset` to `offset + numel` of the stream: [numel], float32, N(0, 1).

    The bits depend on the device's logarithm and cosine (a CPU and a GPU agree to about 1e-6) but
    not on how a range is cut. No value exceeds √(66 ln 2) = 6.77 in magnitude; a true normal does
    so once in 10¹¹.
    """
    z = torch.empty(numel, dtype=torch.float32, device=device)
    for part, values in _chunks(numel, stream, offset, device, GAUSSIAN):
        z[part] = values
    return z


def add_noise_plain(
    total: Tensor, out: Tensor, stream: NoiseStream, std: float, divisor: float,
    place: Place | None = None, values: Values | None = None,
    earlier: Sequence[tuple[float, NoiseStream]] = (),
) -> None:  # fmt: skip
    """Writes `out ← (total + std·(z + Σ w·z')) / divisor`; `total` and `out` contiguous, [n].

    Args:
        place: where `total` lies in the parameter; None: it is the whole.
        values: how words become z; default: normal numbers.
        earlier: each w, and the stream of its z'.
    """
    values = values or GAUSSIAN
    place = (Span(0, 0, total.numel(), total.numel(), 1),) if place is None else place
    if earlier:
        stream = _joined([stream, *(of_earlier for _, of_earlier in earlier)], total.device)
    weights = torch.tensor([1.0, *(w for w, _ in earlier)], dtype=total.dtype, device=total.device)
    for run in place:
        for part, z in _chunks_of_run(run, stream, total.device, values):
            noise = z.to(total.dtype)
            if earlier:
                noise = noise.mul_(weights[:, None]).sum(0)
            noisy = noise.mul_(std).add_(total[part])
            torch.div(noisy, divisor, out=out[part])


def add_noise_to_short(
    totals: Sequence[Tensor], outs: Sequence[Tensor], streams: Sequence[NoiseStream], std: float,
    divisor: float, values: Values | None = None,
) -> None:  # fmt: skip
    """Calls `add_noise_plain` for many whole tensors of one dtype, with one set of operations.

    Numbers are made in rows, each with the words of its own tensor's stream, so they are the same;
    of a tensor's last row some are left over.
    """
    values = values or GAUSSIAN
    each, device = ROW // values.per_counter, totals[0].device
    sizes = [total.numel() for total in totals]
    rows = [-(-size // ROW) or 1 for size in sizes]
    firsts = list(accumulate(rows, initial=0))
    words = torch.frombuffer(array("q", chain.from_iterable(streams)), dtype=torch.int64)
    table = torch.cat([words.view(-1, 4), torch.tensor(firsts[:-1], device="cpu")[:, None]], 1).to(
        device
    )
    *own, begin = table.repeat_interleave(torch.tensor(rows, device=device), 0)[..., None].unbind(1)
    numbers = torch.arange(firsts[-1], device=device)[:, None] - begin
    counters = numbers * each + torch.arange(each, device=device)
    z = _values(counters, NoiseStream(*own), values).to(totals[0].dtype).mul_(std).view(-1)
    parts = [part for n, count in zip(sizes, rows, strict=True) for part in (n, ROW * count - n)]
    z = torch.cat(z.split_with_sizes(parts)[::2])  # without what is left over
    flat = [total if total.ndim == 1 else total.view(-1) for total in totals]
    noisy = z.add_(torch.cat(flat)).div_(divisor)
    each_out = zip(outs, totals, flat, strict=True)
    targets = [row if out is total else out.view(-1) for out, total, row in each_out]
    copy_each(targets, noisy.split(sizes))


def _joined(streams: Sequence[NoiseStream], device: torch.device) -> NoiseStream:
    """Returns streams as one, whose words are tensors [streams, 1]: `philox` makes all at once."""
    return NoiseStream(*torch.tensor(streams, device=device)[..., None].unbind(1))  # type: ignore


def philox(counters: Tensor, stream: NoiseStream) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns Philox4x32-10 of the 128-bit counters (`counters` low, the stream's words high).

    It is computed by NumPy on a CPU, which takes less time.

    Args:
        counters: [n], int64, read as 64 unsigned bits.

    Returns:
        four tensors [n] of int64 in [0, 2³²), or [streams, n] of several that are joined.
    """
    if not counters.is_cpu or type(counters) is not Tensor:
        return _philox(torch, counters, *stream)
    # Unsigned, whose shift is the faster one.
    words = [x.numpy().view(np.uint64) if isinstance(x, Tensor) else x for x in stream]
    found = _philox(np, counters.numpy().view(np.uint64), *words)
    w0, w1, w2, w3 = (torch.from_numpy(x.view(np.int64)) for x in found)
    return w0, w1, w2, w3


def _philox(
    library: Any, counters: Any, k0: Any, k1: Any, c2: Any, c3: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns `philox` by operators that PyTorch and NumPy have in common."""
    multiply, shift = library.multiply, library.bitwise_right_shift
    xor, mask = library.bitwise_xor, library.bitwise_and
    # A product of two 32-bit words wraps in 64 bits, but all of these are right. Its low half is
    # left with the high half above it until it meets the next mask, which saves two passes.
    none = library.zeros_like(counters & k0)  # of the shape of the result
    x0, x1, x2, x3 = none + (counters & WORD), none + (counters >> 32), none + c2, none + c3
    if not isinstance(k0, int):  # a key for each number is read faster than one for each row
        k0, k1 = none + k0, none + k1
    p0, p1 = library.empty_like(x0), library.empty_like(x0)
    for _ in range(ROUNDS):
        multiply(x0, MULTIPLIERS[0], out=p0)
        multiply(x2, MULTIPLIERS[1], out=p1)
        shift(p1, 32, out=x0)
        shift(p0, 32, out=x2)
        for own, other, key in ((x0, x1, k0), (x2, x3, k1)):
            xor(own, other, out=own)
            xor(own, key, out=own)
            mask(own, WORD, out=own)
        x1, p1, x3, p0 = p1, x1, p0, x3
        k0 += KEY_STEPS[0]  # masked with x0 and x2
        k1 += KEY_STEPS[1]
    return x0, mask(x1, WORD, out=x1), x2, mask(x3, WORD, out=x3)


def _chunks(
    numel: int, stream: NoiseStream, offset: int, device: torch.device | str, made: Values
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (slice of [0, numel), its values [m]), in order; [streams, m] of joined streams."""
    each, size = made.per_counter, _chunk(stream)
    first, last = offset // each, (offset + numel + each - 1) // each
    for begin in range(first, last, size):
        counters = torch.arange(begin, min(begin + size, last), device=device)
        start = each * begin - offset  # negative where a counter has values before the slice
        values = _values(counters, stream, made)[..., max(0, -start) : numel - start]
        start = max(0, start)
        yield slice(start, start + values.shape[-1]), values


def _chunk(stream: NoiseStream) -> int:
    """Returns how many counters are taken at once, of joined streams together."""
    joined: Any = stream.key_0
    return CHUNK if isinstance(joined, int) else max(1, CHUNK // len(joined))


def _values(counters: Tensor, stream: NoiseStream, made: Values) -> Tensor:
    """Returns the values of counters [n]: [n · per_counter], or [streams, n · per_counter]."""
    w0, w1, w2, w3 = philox(counters, stream)
    values = made.of((w0.view(-1), w1.view(-1), w2.view(-1), w3.view(-1)))
    return values.view(*w0.shape[:-1], -1)


def _chunks_of_run(
    run: Span, stream: NoiseStream, device: torch.device | str, made: Values
) -> Iterator[tuple[slice, Tensor]]:
    """Yields `_chunks` of a run: pairs (where in the part, its values), in order."""
    each = made.per_counter
    if run.count == 1 or run.length > each * _chunk(stream):
        for q in range(run.count):
            start = run.local_start + q * run.length
            offset = run.offset + q * run.stride
            for part, values in _chunks(run.length, stream, offset, device, made):
                yield slice(start + part.start, start + part.stop), values
        return
    # Counters of a row, whichever of a counter's values it begins with.
    width = (run.length + 2 * each - 2) // each
    rows = max(1, _chunk(stream) // width)
    lanes = torch.arange(run.length, device=device)
    for q in range(0, run.count, rows):
        number = torch.arange(q, min(q + rows, run.count), device=device)
        starts = number * run.stride + run.offset
        counters = starts.div(each, rounding_mode="floor")[:, None]
        counters = counters + torch.arange(width, device=device)
        values = _values(counters.view(-1), stream, made).unflatten(-1, (len(starts), -1))
        mine = ((starts % each)[:, None] + lanes).expand(*values.shape[:-1], -1)
        values = values.gather(-1, mine).flatten(-2)
        start = run.local_start + q * run.length
        yield slice(start, start + values.shape[-1]), values


def _box_muller(words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Returns four normals per counter, [4n] float32, those of one counter next to each other.

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


class Values(NamedTuple):
    """A conversion of random words to noise.

    Attributes:
        per_counter: numbers that are made of the four words of a counter.
        of: four tensors [n] of words -> [n · per_counter], float32.
    """

    per_counter: int
    of: Callable[[tuple[Tensor, Tensor, Tensor, Tensor]], Tensor]


GAUSSIAN = Values(4, _box_muller)


def uniform(words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Returns two uniform numbers per counter, [2n] float64: (i + ½)/2⁵² for i < 2⁵²."""
    pairs = [(words[i] << 20) + (words[i + 1] >> 12) for i in (0, 2)]
    return torch.stack(pairs, 1).view(-1).double().add_(0.5).mul_(2.0**-52)
