"""The noise: Philox's published vectors, the right distribution, and an address for every value.

The key is fixed, so no test here is random: a bound that holds today holds tomorrow. Bounds on
statistics are at about five standard deviations, and each check is shown something it must reject.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from dp_clipping.distributed.placement import Span, spans_of
from dp_clipping.noise import gaussian as noise
from dp_clipping.noise import kernel as kernels
from dp_clipping.noise.add_noise import add_noise_to_all
from dp_clipping.noise.gaussian import NoiseStream, standard_normal
from tests.support.one_noise import add_noise

SECRET = bytes(range(32))
N = 100_000
ALPHA = 1e-6  # of each statistical check


def stream(step: int = 0, parameter: str = "layer.weight", share: int = 0, secret: bytes = SECRET):
    return NoiseStream.derive(secret, step=step, parameter=parameter, share=share)


def draw(numel: int, at: NoiseStream | None = None, offset: int = 0) -> torch.Tensor:
    return standard_normal(numel, at or stream(), offset=offset, device="cpu")


def right_scale(z: torch.Tensor) -> bool:
    low, high = stats.chi2.interval(1 - ALPHA, z.numel())
    return low < z.double().square().sum().item() < high


def zero_mean(z: torch.Tensor) -> bool:
    return abs(z.double().mean().item()) * math.sqrt(z.numel()) < stats.norm.isf(ALPHA / 2)


def normal_kurtosis(z: torch.Tensor) -> bool:
    return abs(stats.kurtosis(z.double().numpy())) < 5 * math.sqrt(24 / z.numel())


def normal_distribution(z: torch.Tensor) -> bool:
    return stats.kstest(z.double().numpy(), "norm").pvalue > ALPHA


def uncorrelated(a: torch.Tensor, b: torch.Tensor) -> bool:
    product = (a.double() * b.double()).sum().item() / (a.norm() * b.norm()).item()
    return abs(product) < 5 / math.sqrt(a.numel())


ZEROS, ONES = (0,) * 6, (0xFFFFFFFF,) * 6
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
KNOWN_ANSWERS = [  # Random123's kat_vectors: four counter words and two key words, the result
    (ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("words", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(words, expected):
    c0, c1, c2, c3, k0, k1 = words
    low = np.array([c0 | c1 << 32] * 3, dtype=np.uint64).view(np.int64)
    result = noise.philox(torch.from_numpy(low), NoiseStream(k0, k1, c2, c3))
    assert [word.tolist() for word in result] == [[word] * 3 for word in expected]


def test_box_muller_of_the_words():
    """Against float64, from the same float32 uniform numbers."""
    words = noise.philox(torch.arange(5000), stream())
    w = [word.numpy().astype(np.uint32) for word in words]
    expected = np.empty((5000, 4))
    for i in (0, 2):
        u = w[i].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
        angle = w[i + 1].view(np.int32) * (math.pi * 2**-31)
        radius = np.sqrt(-2 * np.log(u.astype(np.float64)))
        expected[:, i] = radius * np.cos(angle)
        expected[:, i + 1] = radius * np.sin(angle)
    assert np.abs(draw(20_000).numpy() - expected.ravel()).max() < 1e-6


def test_extreme_words_stay_finite():
    extremes = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    words = torch.cartesian_prod(extremes, extremes, extremes, extremes).unbind(1)
    z = noise._box_muller(words)
    assert z.isfinite().all()
    assert z.abs().max().item() == pytest.approx(math.sqrt(66 * math.log(2)), rel=1e-6)


def test_stream_does_not_change_with_the_version():
    """A checkpoint resumed by a later version must draw the noise that it would have drawn."""
    drawn = draw(6, stream(step=7, share=1))
    expected = [0.5031254, -0.8193172, -0.2023706, 1.3616638, 2.0816493, 1.3014196]
    torch.testing.assert_close(drawn, torch.tensor(expected))


@pytest.mark.parametrize("lane", [*range(4), None])
def test_distribution(lane):
    """Of all values, and of each of the four that one counter gives."""
    z = draw(N) if lane is None else draw(4 * N)[lane::4]
    for check in (right_scale, zero_mean, normal_kurtosis, normal_distribution):
        assert check(z), check.__name__


def test_checks_reject_what_is_not_normal():
    z = draw(N)
    assert not any(right_scale(wrong * z) for wrong in (2 / 3, 3 / 2))
    uniform = (torch.arange(N) + 0.5).div(N).sub(0.5).mul(math.sqrt(12))
    assert not zero_mean(z + 0.03)
    assert not normal_kurtosis(uniform)
    assert not normal_distribution(uniform)
    assert not normal_distribution(z.abs())
    assert not uncorrelated(z, 0.02 * z + draw(N, stream(step=1)))


def test_no_two_streams_share_a_word():
    secrets = [SECRET, bytes(32), bytes(31) + b"\x01", b"\x01" + bytes(31)]
    names = ["", "a", "aa", "b", "a\0", "0", "\0\0\0\0\0\0\0\0a"]
    streams = [
        stream(*at) for at in itertools.product([0, 1, 2, 256, 2**40], names, range(3), secrets)
    ]
    for word in ("key_0", "key_1", "counter_2", "counter_3"):
        values = {getattr(s, word) for s in streams}
        assert len(values) >= len(streams) - 1  # 420 words of 32 bits: one collision at the most
        assert 2**31 < max(values) < 2**32


LONG = 5 * noise.CHUNK + 5
SLICES = [
    (0, 1), (1, 1), (2, 1), (3, 1), (0, 0), (3, 0), (1, 2), (1, 7), (5, 4), (3, 1001), (4, 4096),
    (4 * noise.CHUNK - 1, 2), (4 * noise.CHUNK - 3, 5), (6, 4 * noise.CHUNK), (LONG - 1, 1),
    (1, LONG - 1),
]  # fmt: skip


@pytest.mark.parametrize("base", [0, 2**31 - 6, 2**34 - 9, 2**62 + 1])
def test_slices(base):
    """A slice of a large draw is the draw of the slice; 2³⁴ is where the counter's first word ends,
    and slices are drawn out of order."""
    whole = draw(LONG, offset=base)
    for start, length in reversed(SLICES):
        part = draw(length, offset=base + start)
        assert torch.equal(part, whole[start : start + length])
    cuts = [0, 1, 5, 70_001, 4 * noise.CHUNK + 2, LONG]
    for start, end in itertools.pairwise(cuts):
        total = torch.full((end - start,), 0.5)
        noisy = add_noise(total, stream(), std=2, divisor=3, offset=base + start)
        assert torch.equal(noisy, (2 * whole[start:end] + 0.5) / 3)


@pytest.mark.parametrize("far", [2**31, 2**32, 2**33, 2**34, 2**35, 2**48, 2**62])
def test_far_offsets_are_other_values(far):
    """No high bit of the offset is lost."""
    near, there = draw(10_000), draw(10_000, offset=far)
    assert (near == there).sum() <= 1
    assert (abs(near) == abs(there)).sum() <= 2
    assert uncorrelated(near, there)


def test_one_thread_or_two():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw(LONG)
        torch.set_num_threads(2)
        assert torch.equal(draw(LONG), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_add_noise_computes_in_float32_and_casts_last(dtype):
    total = draw(5000, stream(step=1)) * 100
    accumulation_dtype = (total + 3.5 * draw(5000, offset=9)) / 7
    noisy = add_noise(total, stream(), std=3.5, divisor=7, dtype=dtype, offset=9)
    assert noisy.dtype == dtype
    assert torch.equal(noisy, accumulation_dtype.to(dtype))
    exact = (total.double() + 3.5 * draw(5000, offset=9).double()) / 7
    assert (accumulation_dtype - exact).abs().max() < 1e-5


def test_add_noise_to_a_float64_sum():
    total = torch.full((5000,), 1e9, dtype=torch.float64)
    noisy = add_noise(total, stream(), std=1e-3, divisor=2)
    assert torch.equal(noisy, (1e9 + 1e-3 * draw(5000).double()) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_std_draws_nothing(monkeypatch, dtype):
    monkeypatch.setattr(noise, "philox", None)
    total = torch.arange(10.0)
    assert torch.equal(
        add_noise(total, stream(), std=0, divisor=3, dtype=dtype), (total / 3).to(dtype)
    )


LAYOUTS = {
    "scalar": lambda: torch.ones(()),
    "empty": lambda: torch.ones(0, 3),
    "matrix": lambda: torch.ones(6, 5),
    "transposed": lambda: torch.ones(5, 6).T,
    "strided": lambda: torch.ones(12, 10)[::2, ::2],
    "expanded": lambda: torch.ones(1, 5).expand(6, 5),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


def test_a_captured_launch_reads_the_streams_of_its_sums(monkeypatch):
    """From a table of all streams, of which a CUDA graph's launch for one dtype has some."""
    made = []
    monkeypatch.setattr(noise, "serves", lambda total: total.dtype == torch.float32)
    monkeypatch.setattr(kernels, "add_noise_kernel_launch", lambda *given: made.append(given[6]))
    table = SimpleNamespace(take=lambda numbers, rows: (numbers, rows))
    for one in (None, table):
        totals = [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(4)]
        dtypes = [total.dtype for total in totals]
        streams = [stream(parameter=name) for name in "abc"]
        add_noise_to_all(totals, streams, std=1, divisor=2, dtypes=dtypes, table=one)
    assert made[0] is None
    assert made[1]("rows") == ([0, 2], "rows")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Element i is the i-th in row-major order, whatever the strides."""
    total = LAYOUTS[layout]()
    expected = 1 + draw(total.numel(), offset=2).reshape(total.shape)
    noisy = add_noise(total, stream(), std=1, offset=2)
    assert torch.equal(noisy, expected)
    assert noisy.is_contiguous()
    (same,) = add_noise_to_all([total], [stream()], std=1, divisor=1, dtypes=[total.dtype])
    assert torch.equal(same, 1 + draw(total.numel()).reshape(total.shape))


def test_a_sum_is_written_whole_and_nothing_else():
    guard = torch.full((20,), torch.nan)
    guard[5:15] = 0
    (noisy,) = add_noise_to_all([guard[5:15]], [stream()], std=1, divisor=1, dtypes=[guard.dtype])
    assert noisy.data_ptr() == guard[5:].data_ptr()
    assert torch.equal(noisy, draw(10))
    assert guard[:5].isnan().all()
    assert guard[15:].isnan().all()


GRID = {  # of a parameter of that shape, boxes that have every element once
    (12, 10): [((a, 6), (b, 5)) for a in (0, 6) for b in (0, 5)],
    (7, 9): [((a, n), (b, m)) for a, n in [(0, 4), (4, 3)] for b, m in [(0, 5), (5, 3), (8, 1)]],
    (3, 5, 4): [((0, 3), (a, n), (b, 2)) for a, n in [(0, 1), (1, 4)] for b in (0, 2)],
    (60_000, 3): [((0, 60_000), (0, 2)), ((0, 60_000), (2, 1))],
    (3, 4 * noise.CHUNK + 9): [((0, 3), (0, 7)), ((0, 3), (7, 4 * noise.CHUNK + 2))],
}


@pytest.mark.parametrize("shape", GRID)
def test_parts_get_the_noise_of_the_whole(shape):
    total = draw(math.prod(shape), stream(step=1)).view(shape)
    whole = add_noise(total, stream(), std=2, divisor=3)
    written = torch.full(shape, torch.nan)
    for box in GRID[shape]:
        where = tuple(slice(a, a + n) for a, n in box)
        place = spans_of(box, shape)
        written[where] = add_noise(total[where], stream(), std=2, divisor=3, place=place)
        (part,) = add_noise_to_all(
            [total[where].clone()], [stream()], std=2, divisor=3, dtypes=[torch.float64],
            places=[place],
        )  # fmt: skip
        assert torch.equal(part, written[where].double())
    assert torch.equal(written, whole)


def test_places_of_many():
    """Whole, part and empty part side by side; no place is a place of its own."""
    totals = [torch.zeros(6), torch.zeros(2, 3), torch.zeros(0, 3), torch.zeros(())]
    places = [None, (Span(0, 4, 3, 10, 2),), (), None]
    streams = [stream(parameter=str(i)) for i in range(4)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    noisy = add_noise_to_all(totals, streams, std=1, divisor=2, dtypes=dtypes, places=places)
    expected = [draw(6, streams[0]), draw(20, streams[1])[[4, 5, 6, 14, 15, 16]].view(2, 3)]
    expected += [torch.zeros(0, 3), draw(1, streams[3]).view(())]
    for got, z, dtype in zip(noisy, expected, dtypes, strict=True):
        assert torch.equal(got, (z / 2).to(dtype))


def test_words_are_not_printed():
    words = stream()
    for value in (words.key_0, words.key_1, words.counter_2, words.counter_3):
        assert str(value) not in repr(words)
        assert hex(value)[2:] not in repr(words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": -1.0}, "std must be"),
        ({"std": math.nan}, "std must be"),
        ({"std": math.inf}, "std must be"),
        ({"divisor": 0.0}, "divisor must be"),
        ({"divisor": -2.0}, "divisor must be"),
        ({"divisor": math.inf}, "divisor must be"),
    ],
)
def test_add_noise_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        add_noise(**{"total": torch.zeros(4), "stream": stream(), "std": 1.0, **options})


def test_uniform_numbers_have_the_bits_of_two_words():
    words = tuple(torch.tensor([w]) for w in (1, 5 << 12, 2**31, 7 << 12))
    expected = [((1 << 20) + 5 + 0.5) / 2**52, ((2**31 << 20) + 7 + 0.5) / 2**52]
    assert noise.uniform(words).tolist() == expected
