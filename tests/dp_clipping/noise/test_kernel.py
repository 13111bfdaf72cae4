"""The fused noise kernel against its reference; without a GPU in Triton's interpreter."""

import math
from collections.abc import Callable
from itertools import cycle, product
from unittest.mock import patch

import pytest
import torch

from dp_clipping.distributed.placement import Span, spans_of
from dp_clipping.noise import gaussian as noise
from dp_clipping.noise import kernel as kernels
from dp_clipping.noise.add_noise import add_noise_to_all
from dp_clipping.noise.gaussian import NoiseStream, standard_normal
from tests.support.one_noise import STREAMS, add_noise

pytest.importorskip("triton")

PROGRAM = 4 * kernels.BLOCK
LOOPS = kernels.LOOPS if torch.cuda.is_available() else 2  # the interpreter takes long for each
SIZES = [0, 1, 2, 3, 4, 5, 127, PROGRAM - 1, PROGRAM, PROGRAM + 1, 3 * PROGRAM + 2]
OFFSETS = [0, 1, 2, 3, 4, 2**31 - 2, 2**34 - 5, 2**40 + 3, 2**62 + 1]
HALF_STEP = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def check_noise(device: str) -> None:
    """Normals differ by rounding only; nothing is written outside."""
    everything = [*product(STREAMS, OFFSETS, [*SIZES, 1_000_003])]
    some = [
        *product(STREAMS[:1], [0, 3, 2**34 - 5], SIZES),
        *zip(cycle(STREAMS), OFFSETS, [PROGRAM + 3] * len(OFFSETS)),
    ]
    for stream, offset, n in some if device == "cpu" else everything:
        guard = torch.full((n + 8,), torch.nan, device=device)
        total, place = torch.zeros(n, device=device), (Span(0, offset, n, n, 1),) if n else ()
        kernels.add_noise_kernel_launch([total], [guard[:n]], [stream], [place], 1.0, 1.0)
        expected = standard_normal(n, stream, offset=offset, device=device)
        torch.testing.assert_close(guard[:n], expected, rtol=0, atol=2e-6)
        assert guard[n:].isnan().all(), "written behind its end"


def check_result(device: str) -> None:
    """Sum, scale, divisor and the cast at the end, in every output dtype, also in place."""
    n, stream = 3 * PROGRAM + 5, STREAMS[0]
    total = torch.linspace(-40, 40, n, device=device)
    for dtype, half_step in HALF_STEP.items():
        if device == "cpu" and dtype == torch.bfloat16:
            half_step *= 2  # the interpreter cuts off where a GPU rounds
        for std, divisor in [(1.0, 1.0), (3.5, 256.0), (2 / 3, 3.0), (0.0, 7.0)]:
            out = add_noise(total, stream, std=std, divisor=divisor, dtype=dtype, offset=6)
            z = standard_normal(n, stream, offset=6, device=device).double()
            exact = (total.double() + std * z) / divisor
            error = (out.double() - exact).abs()
            # float32 rounds the sum, the quotient and z, all of which the divisor shrinks
            bound = half_step * exact.abs() + (1.2e-5 + 2e-6 * std) / divisor
            assert (error <= 1.001 * bound).all(), (dtype, std, divisor)
    sums = [total.clone(), total.clone()]
    noisy = add_noise_to_all(
        sums, [stream] * 2, std=2.0, divisor=4.0, dtypes=[total.dtype] * 2,
        places=[None, (Span(0, 3, n, n, 1),)],
    )  # fmt: skip
    for offset, in_place, result in zip((0, 3), sums, noisy, strict=True):
        assert result is in_place
        torch.testing.assert_close(result, plain(total, 2.0, 4.0, offset), rtol=1e-6, atol=2e-6)


def plain(total: torch.Tensor, std: float, divisor: float, offset: int) -> torch.Tensor:
    out, n = torch.empty_like(total), total.numel()
    noise.add_noise_plain(total, out, STREAMS[0], std, divisor, (Span(0, offset, n, n, 1),))
    return out


def check_layouts(device: str) -> None:
    """Through the public function: element i is the i-th in row-major order."""
    everything = torch.arange(40 * 50.0, device=device).view(40, 50)
    for total in (everything.T, everything[::3, 1::2], everything[:, :1].expand(40, 50)):
        for dtype in (torch.float32, torch.bfloat16):
            noisy = add_noise(total, STREAMS[0], std=2.0, divisor=4.0, dtype=dtype, offset=7)
            expected = plain(total.reshape(-1), 2.0, 4.0, 7).view(total.shape)
            rounding = max(1e-6, 2 * HALF_STEP[dtype])
            torch.testing.assert_close(noisy.float(), expected, rtol=rounding, atol=2e-6)


def check_many(device: str) -> None:
    """One launch for many tensors gives each the bits of its own launch."""
    sizes = [0, 1, 5, PROGRAM, PROGRAM * LOOPS, PROGRAM * LOOPS + 3]
    streams = [
        NoiseStream.derive(bytes(32), step=1, parameter=str(n), share=0) for n in range(len(sizes))
    ]
    streams[1], streams[2] = STREAMS[3], STREAMS[4]
    dtypes = [torch.float32, torch.bfloat16] * 3
    totals = [torch.linspace(-9, 9, n, device=device) for n in sizes]
    totals[2] = torch.linspace(-9, 9, 10, device=device)[::2]
    expected = [
        add_noise(total, stream, std=3.0, divisor=7.0, dtype=dtype)
        for total, stream, dtype in zip(totals, streams, dtypes, strict=True)
    ]
    got = add_noise_to_all(totals, streams, std=3.0, divisor=7.0, dtypes=dtypes)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


BOXES = {  # a parameter's shape, its parts
    (40, 64): [
        ((0, 40), (0, 64)), ((10, 10), (0, 64)), ((0, 40), (16, 16)), ((20, 20), (32, 32)),
        ((7, 1), (3, 5)), ((0, 40), (61, 3)), ((3, 37), (1, 62)),
    ],
    (33, 35): [
        ((0, 33), (0, 18)), ((0, 33), (18, 17)), ((11, 11), (0, 35)), ((32, 1), (34, 1)),
        ((33, 0), (0, 35)), ((5, 20), (4, 8)), ((0, 33), (34, 1)),
    ],
    (2, 90, 7): [((0, 2), (1, 89), (0, 7)), ((0, 2), (5, 80), (1, 6))],
    (2, 3 * PROGRAM): [((0, 2), (0, 2 * PROGRAM)), ((0, 2), (PROGRAM + 3, 2 * PROGRAM - 4))],
    (PROGRAM * LOOPS // 12 + 3, 20): [((0, PROGRAM * LOOPS // 12 + 3), (8, 12))],
}  # fmt: skip


def check_parts(device: str) -> None:
    """A part of a parameter gets the bits that its elements get in the whole."""
    for dtype in (torch.float32, torch.bfloat16):
        wholes, parts, streams, places = [], [], [], []
        for shape, boxes in BOXES.items():
            for box in boxes[:2] if (device, dtype) == ("cpu", torch.bfloat16) else boxes:
                stream = NoiseStream.derive(bytes(32), step=1, parameter=f"{shape}{box}", share=0)
                total = torch.linspace(-9, 9, math.prod(shape), device=device).view(shape)
                part = total[tuple(slice(a, a + n) for a, n in box)]
                noisy = add_noise(total, stream, std=3.0, divisor=7.0, dtype=dtype)
                wholes.append(noisy[tuple(slice(a, a + n) for a, n in box)])
                parts.append(part)
                streams.append(stream)
                places.append(spans_of(box, shape))
        wholes.append(add_noise(wholes[0].float(), STREAMS[3], std=3.0, divisor=7.0, dtype=dtype))
        parts.append(wholes[0].float())
        streams.append(STREAMS[3])
        places.append(None)
        together = add_noise_to_all(
            [part.clone() for part in parts], streams,
            std=3.0, divisor=7.0, dtypes=[dtype] * len(parts), places=places,
        )  # fmt: skip
        for whole, part in zip(wholes, together, strict=True):
            assert part.dtype == dtype
            assert torch.equal(part, whole)
        alone = add_noise(parts[1], streams[1], std=3.0, divisor=7.0, dtype=dtype, place=places[1])
        assert torch.equal(alone, wholes[1])


def check_places(device: str) -> None:
    """Runs anywhere in a stream: nothing is written outside of the part."""
    for stream in (STREAMS[0], STREAMS[3]):
        for place in (
            (Span(0, 2**34 - 9, 5, 9, 7),),
            (Span(0, 2**40 + 3, 3, 2**33 + 1, 3), Span(9, 4, 4, 8, 2), Span(17, 1, 1, 2, 300)),
            (Span(0, 2**62 + 4, 2 * PROGRAM, 2**35, 2),),
            (Span(0, 2**34 - 4, 3 * PROGRAM + 1, 1, 1),),
        ):
            n = sum(run.numel for run in place)
            guard = torch.full((n + 8,), torch.nan, device=device)
            total = torch.zeros(n, device=device)
            kernels.add_noise_kernel_launch([total], [guard[4:-4]], [stream], [place], 1.0, 1.0)
            expected = torch.cat([
                standard_normal(r.length, stream, offset=r.offset + q * r.stride, device=device)
                for r in place
                for q in range(r.count)
            ])  # fmt: skip
            torch.testing.assert_close(guard[4:-4], expected, rtol=0, atol=2e-6)
            assert guard[:4].isnan().all()
            assert guard[-4:].isnan().all()


EARLIER = [
    (weight, NoiseStream.derive(bytes(32), step=4 - i, parameter="weight", share=1))
    for i, weight in enumerate((-0.5, -0.125, 1 / 3))
]


def check_earlier(device: str) -> None:
    """Noise of earlier steps joins in registers: whole tensors, parts, and nothing outside."""
    sizes = [1, 5, PROGRAM + 3, PROGRAM * LOOPS + 3]
    totals = [torch.linspace(-9, 9, n, device=device) for n in sizes]
    place = (Span(0, 3, 5, 9, 7), Span(35, 2**34 - 9, 8, 12, 3), Span(59, 2**40, 300, 1, 1))
    pairs = [*product((EARLIER[:1], EARLIER), (torch.float32, torch.float16))]
    for earlier, dtype in pairs[::3] if device == "cpu" else pairs:
        options = {"std": 3.0, "divisor": 7.0, "earlier": earlier, "dtype": dtype}
        for total in totals:
            check_earlier_alone(
                add_noise(total, STREAMS[0], offset=5, **options), total, earlier, 5
            )
        whole = add_noise(totals[2], STREAMS[0], **options)
        many = add_noise_to_all(
            [totals[1].clone(), totals[2].clone(), torch.zeros(359, device=device)],
            [STREAMS[4], STREAMS[0], STREAMS[0]], std=3.0, divisor=7.0, dtypes=[dtype] * 3,
            places=[None, None, place],
            earlier=[(weight, [STREAMS[1], own, own]) for weight, own in earlier],
        )  # fmt: skip
        assert torch.equal(many[1], whole)
        start = 0
        for run in place:
            for q in range(run.count):
                part = many[2][start : (start := start + run.length)]
                zeros = torch.zeros(run.length, device=device)
                check_earlier_alone(part, zeros, earlier, run.offset + q * run.stride)


def check_earlier_alone(got, total, earlier, offset) -> None:
    """Against float64: (total + 3(z + Σ w·z')) / 7."""
    z = [
        weight * standard_normal(len(total), s, offset=offset, device=total.device).double()
        for weight, s in [(1.0, STREAMS[0]), *earlier]
    ]
    exact = (total.double() + 3 * sum(z)) / 7
    rounding = HALF_STEP[got.dtype] * exact.abs() + 3e-6
    assert ((got.double() - exact).abs() <= rounding).all()


BODIES = [
    check_noise, check_result, check_layouts,
    check_many, check_parts, check_places, check_earlier,
]  # fmt: skip


def interpreted(body: Callable[[str], None]) -> None:
    whole = kernels.pieces_of

    def pieces_of(sizes, device):
        return whole(sizes, device, PROGRAM * LOOPS)

    with (
        patch.object(noise, "serves", lambda total: total.dtype == torch.float32),
        patch.multiple(kernels, LOOPS=LOOPS, pieces_of=pieces_of),
    ):
        body("cpu")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(interpreted, body)


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_compiled_kernel(body):
    body("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_elements_than_32_bits_count():
    n = 2**31 + 5
    total = torch.zeros(1, device="cuda").expand(n).contiguous()
    (out,) = add_noise_to_all([total], [STREAMS[0]], std=1.0, divisor=1.0, dtypes=[torch.bfloat16])
    expected = standard_normal(1000, STREAMS[0], offset=n - 1000, device="cuda").bfloat16()
    torch.testing.assert_close(out[-1000:], expected)
    assert out.isfinite().all()


def test_the_kernel_serves_float32_on_a_gpu_only():
    assert not noise.serves(torch.zeros(1))
    if torch.cuda.is_available():
        assert noise.serves(torch.zeros(1, device="cuda"))
        assert not noise.serves(torch.zeros(1, dtype=torch.float64, device="cuda"))
