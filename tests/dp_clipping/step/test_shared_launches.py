"""Kernels that serve many layers at once, and the small ones, beside their references.

As in test_kernels.py: in the interpreter, and compiled on a GPU.
"""

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from dp_clipping.clipping.coefficients import HIGHEST, LOWEST
from dp_clipping.kernels import grouped_launch
from dp_clipping.kernels.coefficients import clip_coefficients, clip_coefficients_plain
from dp_clipping.kernels.embedding import TokenSums
from dp_clipping.kernels.gradient import gradient_and_squares, gradients_and_squares
from dp_clipping.kernels.sorted_coefficients import MOST, SortedCoefficients
from dp_clipping.kernels.squared_norms import BLOCK, squared_norms, squared_norms_plain
from dp_clipping.kernels.tiles import Tile, tile_of
from dp_clipping.kernels.weighted_product import (
    weighted_product,
    weighted_product_plain,
    weighted_products,
)
from dp_clipping.kernels.weighted_sum import weighted_sum_plain, weighted_sums
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.step.clipped_sums import Coefficients, clipped_sums

SHAPES = [(16, 24), (33, 7), (40, 16), (1, 1), (64, 48), (24, 16)]  # d, p; more than one table's


def pairs(device: str, dtype: torch.dtype, batch_size: int, tokens: int, count: int):
    torch.manual_seed(0)
    found = []
    for number in range(count):
        d, p = SHAPES[number % len(SHAPES)]
        found.append(tuple(torch.randn(batch_size, tokens, n).to(device, dtype) for n in (d, p)))
    return found


def check_products(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    """Each layer gets what a launch of its own would give it, whatever is beside it."""
    many = pairs(device, dtype, 3, 20, grouped_launch.MOST_ROWS + 3) + pairs(device, dtype, 2, 9, 2)
    for store in (True, False):
        together = gradients_and_squares(many, tile, store)
        for (y, a), (g, own) in zip(many, together, strict=True):
            g_alone, alone = gradient_and_squares(y, a, tile, store)
            torch.testing.assert_close(own, alone, rtol=1e-6, atol=0)
            assert (g is None and g_alone is None) or torch.equal(g, g_alone)
    c = torch.tensor([[0.5, 0.0, 2.0], [0.0, 0.0, 0.0], [1.0, 0.25, 1e-6]], device=device)
    three = many[: grouped_launch.MOST_ROWS + 3]
    three[1][0][1] = torch.nan  # left out by the first group, which it belongs to
    groups = [0 if n == 1 else n % 3 for n in range(len(three))]
    totals = weighted_products(three, SortedCoefficients.of(c), groups, tile)
    for (y, a), total, group in zip(three, totals, groups, strict=True):
        expected = weighted_product_plain(y, a, c[group])
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        alone = weighted_product(y, a, SortedCoefficients.of(c[group]), tile)
        torch.testing.assert_close(total, alone, rtol=1e-6, atol=1e-6)


def check_sums(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    """Also where a gradient does not start at a multiple of 16 bytes."""
    torch.manual_seed(0)
    c = torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.25, 1e-6]], device=device)
    gradients = [torch.randn(3, *shape).to(device, dtype) for shape in [*SHAPES, (5000,)] * 3]
    memory = torch.randn(1 + 3 * 32).to(device, dtype)
    gradients.append(memory[1:].view(3, 32))
    gradients[0][1] = torch.inf
    groups = [n % 2 for n in range(len(gradients))]
    for g, total, group in zip(gradients, weighted_sums(gradients, c, groups), groups, strict=True):
        expected = weighted_sum_plain(g, c[group])
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    one = memory[1:].view(1, 96)
    (total,) = weighted_sums([one], torch.ones(1, 1, device=device), [0])
    assert torch.equal(total, one[0].float())


def check_clipped_sums(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    """Of every kind, in the order of arrival; what they were formed of is let go."""
    torch.manual_seed(0)
    c = torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.25, 1e-6]], device=device)
    ids = torch.tensor([[0, 1, 1], [2, 2, 2], [3, 0, 3]], device=device)
    draw = lambda *shape: torch.randn(3, *shape).to(device, dtype)  # noqa: E731
    y, tokens, arrived = draw(20, 16), draw(3, 8), [draw(5, 6), draw(20, 24), draw(7)]
    one_hot = torch.nn.functional.one_hot(ids, 4).to(dtype)
    parts = {  # arrival -> what it leaves, its clipping group, and the same as a product y aᵀ
        "linear": (LinearFactors(arrived[1], y, False), 4, (y, arrived[1])),
        "dense": (arrived[0], 9, None),
        "embedding": (TokenSums.of(ids, tokens), 4, (one_hot, tokens)),
        "transposed": (LinearFactors(arrived[1], y, True), 9, (arrived[1], y)),
        "bias": (arrived[2], 4, None),
    }
    names = {torch.nn.Parameter(torch.empty(0)): name for name in parts}
    saved = {p: parts[name][0] for p, name in names.items()}
    groups = {p: parts[name][1] for p, name in names.items()}
    shapes = {p: torch.Size([4, 8]) for p in names}  # only an embedding's is asked for
    size = None if tile is None else tile.rows
    label = lambda *_: nullcontext()  # noqa: E731
    totals = clipped_sums(saved, Coefficients(c, {9: 0, 4: 1}), groups, shapes, size, label)
    assert [names[p] for p in totals] == list(parts)
    assert saved == {}
    for parameter, total in totals.items():
        one, group, product = parts[names[parameter]]
        own = c[{9: 0, 4: 1}[group]]
        expected = (
            weighted_sum_plain(one, own) if product is None
            else weighted_product_plain(*product, own)
        )  # fmt: skip
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def check_squares(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    torch.manual_seed(0)
    for shape in [(3, 1), (1, BLOCK), (2, BLOCK + 1), (4, 3, 50), (0, 5), (2, 0)]:
        g = torch.randn(shape).to(device, dtype)
        torch.testing.assert_close(squared_norms(g), squared_norms_plain(g), rtol=2e-6, atol=0)
    g = torch.randn(6, 4).to(device, dtype).t()
    torch.testing.assert_close(squared_norms(g), squared_norms_plain(g), rtol=2e-6, atol=0)


def check_coefficients(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    torch.manual_seed(0)
    inf, nan = torch.inf, torch.nan
    for batch_size in (1, 5, 130):
        table = torch.rand(7, batch_size, device=device) * 10 ** torch.randn(7, 1, device=device)
        scales = table.sqrt() * 3
        errors = torch.tensor([[0, 0], [2.0**-16, 1e-4]] * 3 + [[0, 0]], device=device)
        starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
        clip_norms = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, device=device)
        for wrong in (None, inf, -inf, nan, -1e-3):
            if wrong is not None:
                table[4, -1] = wrong
            for gamma in (None, 0.01):
                before = torch.zeros(batch_size, dtype=torch.bool, device=device)
                before[::50] = batch_size > 5
                bad, expected_bad = before.clone(), before.clone()
                arguments = (table, scales, errors, starts, clip_norms, 1 + 2e-5, gamma)
                found = clip_coefficients(*arguments, bad)
                expected = clip_coefficients_plain(*arguments, expected_bad)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
                assert not found[:, bad].any()
                assert torch.equal(bad, expected_bad)
                before[-1] |= wrong is not None and not abs(wrong) < inf
                assert torch.equal(bad, before)
    many = torch.full((1001, 1), 2.9e-8, device=device)  # each lost beside the first in float32
    many[0] = 1.0
    starts = torch.tensor([0, 1001], dtype=torch.int32, device=device)
    nothing = torch.zeros(1001, 2, device=device)
    clip_norms = torch.tensor([0.5], dtype=torch.float64, device=device)
    bad = torch.zeros(1, dtype=torch.bool, device=device)
    c = clip_coefficients(many, many, nothing, starts, clip_norms, 1.0, None, bad)
    assert (c.double() * many.double().sum().sqrt() / 0.5 - 1).abs().item() < 1e-6
    squares = torch.tensor([[0.0, 1e-38, 1.0, 3e38]], device=device)
    starts, bad = starts.clone().fill_(1), torch.zeros(4, dtype=torch.bool, device=device)
    starts[0] = 0
    for limit in (LOWEST, HIGHEST):
        clip_norms = torch.tensor([limit], dtype=torch.float64, device=device)
        for gamma in (None, LOWEST):
            arguments = (squares, squares, nothing[:1], starts, clip_norms, 1.0, gamma)
            c = clip_coefficients(*arguments, bad.clone())
            assert c.isfinite().all(), "an infinite one times zero would be NaN"
            assert (c.double() * squares.double().sqrt() <= limit * (1 + 1e-6)).all()
            expected = clip_coefficients_plain(*arguments, bad.clone())
            torch.testing.assert_close(c, expected, rtol=1e-3, atol=0)


def check_ascending(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    """To the last bit: zeros, equal ones, and more than the kernel takes."""
    torch.manual_seed(0)
    for batch_size in (1, 2, 13, 16, 17, MOST, MOST + 1):
        c = torch.rand(5, batch_size, device=device)
        c[1] = 0
        c[2, ::2] = 0
        c[3] = c[3].mul(3).ceil() / 3
        c[4] *= 1e-30
        c[0, -1] = torch.nan
        found, expected = SortedCoefficients.of(c), SortedCoefficients.plain(c)
        assert torch.equal(found.order, expected.order)
        assert torch.equal(found.ratio, expected.ratio)
        assert torch.equal(found.first, expected.first)
        assert torch.equal(found.last, expected.last)
        one, row = SortedCoefficients.of(c[2]), SortedCoefficients.plain(c[2:3])
        assert torch.equal(one.order, row.order)
        assert torch.equal(one.ratio, row.ratio)


def cases(*dtypes: torch.dtype) -> list:
    """Bodies with the dtypes of operands; tables are float32."""
    of_operands = [check_products, check_sums, check_clipped_sums, check_squares]
    of_tables = [check_coefficients, check_ascending]
    return [*product(of_operands, dtypes), *product(of_tables, [torch.float32])]


def name(value) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("body", "dtype"), cases(torch.float32, torch.float16), ids=name)
def test_in_the_interpreter(interpreter, body, dtype):
    interpreter.run(body, "cpu", dtype, Tile(32, 32, 32, 4, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("body", "dtype"), cases(torch.float32, torch.bfloat16, torch.float16), ids=name
)
def test_compiled(body, dtype):
    body("cuda", dtype, None)


def test_the_widest_operands_of_a_launch_bound_its_tile():
    assert tile_of(None, torch.float16) is None
    for dtypes in ([torch.float32, torch.float16], [torch.float16, torch.float32]):
        assert tile_of(64, *dtypes) == tile_of(64, torch.float32) != tile_of(64, torch.float16)
