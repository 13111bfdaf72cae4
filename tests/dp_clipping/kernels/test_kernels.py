"""The kernels of private steps against their reference implementations, which compute in float64.

Without a GPU they run in Triton's interpreter, with small tiles, without bfloat16, whose products
the interpreter gets wrong. Memory that PyTorch does not initialise holds NaN in these tests, and so
does what lies beside an operand.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels import embedding, gradient, gram, norm_layer_gradients, weighted_product
from dp_clipping.kernels import weighted_sum as weighted_sum_file
from dp_clipping.kernels.embedding import TokenSums
from dp_clipping.kernels.norm_layer_gradients import Normalized
from dp_clipping.kernels.sorted_coefficients import SortedCoefficients
from dp_clipping.kernels.tiles import Tile, is_described
from dp_clipping.kernels.weighted_sum import weighted_sum, weighted_sum_plain

NORM_BOUND = 2e-5  # of squared norms, relative
STORED_BOUND = 2e-6  # the same, against the values that were stored
SUM_BOUND = {torch.float32: 2e-6, torch.float16: 2e-5, torch.bfloat16: 2e-5}  # of magnitudes
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
LAYOUTS = [
    ("contiguous", "contiguous"),
    ("time_major", "padded"),
    ("transposed", "shifted"),
    ("shared", "time_major"),
]

# B, T, d, p: one tile exactly, more than one with rests, with odd strides, one token, nothing.
SHAPES = [
    (1, 32, 32, 32),
    (2, 40, 40, 72),
    (2, 33, 35, 41),
    (3, 1, 33, 5),
    (1, 1, 1, 1),
    (0, 4, 8, 8),
    (2, 0, 8, 8),
]
LARGE = [(3, 1000, 768, 520), (2, 1024, 1024, 3072), (9, 257, 513, 129), (64, 1, 1024, 1000)]


@dataclass(frozen=True)
class Place:
    """Where a body runs, and on what.

    Attributes:
        dtype: of operands.
        tile: of the matrix kernels; None for their own choice.
        shapes: (B, T, d, p).
        layouts: of the two operands.
    """

    device: str
    dtype: torch.dtype
    tile: Tile | None
    shapes: list[tuple[int, int, int, int]]
    layouts: list[tuple[str, str]]

    def normal(self, *shape: int, seed: int = 0, shift: float = 0.0, scale: float = 1.0) -> Tensor:
        """Values of `dtype`, the same on every device."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return ((values + shift) * scale).to(self.device, self.dtype)

    def coefficients(self, batch_size: int) -> Tensor:
        """c [B] over three orders of magnitude, in no order; every second one is zero if B > 1."""
        values = torch.rand(batch_size, generator=torch.Generator().manual_seed(7))
        values = 10 ** (3 * values - 2)
        values[1::2] = 0
        return values.to(self.device)


def lay_out(x: Tensor, how: str) -> Tensor:
    """x [B, T, n] with other strides; what lies between its values is NaN."""
    batch_size, tokens, n = x.shape
    if how == "time_major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "transposed":  # the last stride is not 1
        return x.mT.contiguous().mT
    if how == "shifted":  # neither the address nor the strides are multiples of 16 bytes
        return _within(x, (batch_size, tokens, n + 1), 0, 1)
    if how == "padded":  # strides are, and the address
        return _within(x, (batch_size, tokens + 3, n + 16 - n % 8), 0, 0)
    if how == "shared":  # the samples are one
        return x[:1].expand(batch_size, tokens, n)
    return x


def _within(x: Tensor, shape: tuple[int, ...], first_token: int, first: int) -> Tensor:
    around = x.new_full(shape, torch.nan)
    view = around[:, first_token : first_token + x.shape[1], first : first + x.shape[2]]
    return view.copy_(x)


def poison(x: Tensor, coefficients: Tensor) -> Tensor:
    """x [B, ...] with NaN, and with infinity, where a sample's coefficient is zero."""
    x = x.clone()
    rows = (coefficients == 0).nonzero().flatten().tolist()
    for n, row in enumerate(rows):
        x[row] = (torch.nan, torch.inf)[n % 2]
    return x


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Values that nobody has written are NaN: PyTorch's deterministic mode sees to it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs()
    assert (error <= bound).all(), f"largest error {error.max().item()}"


def assert_squares(found: Tensor, expected: Tensor, relative: float = NORM_BOUND) -> None:
    assert found.dtype == torch.float32
    assert_within(found, expected, relative * expected.double())


# ---- bodies --------------------------------------------------------------------------------------


def check_gradient(place: Place) -> None:
    """Values are rounded once; norms are of the rounded values, or with nothing stored of exact."""
    for (batch_size, tokens, d, p), layouts in product(place.shapes, place.layouts):
        # large enough for gradients beyond float16's largest number
        y = lay_out(place.normal(batch_size, tokens, d, seed=1, scale=100), layouts[0])
        a = lay_out(place.normal(batch_size, tokens, p, seed=2, scale=100), layouts[1])
        found, squares = gradient.gradient_and_squares(y, a, place.tile)
        expected, _ = gradient.gradient_and_squares_plain(y, a)
        assert found.dtype == expected.dtype == gradient.stored_dtype(place.dtype)
        magnitude = torch.bmm(y.double().abs().mT, a.double().abs())
        bound = SUM_BOUND[place.dtype] * magnitude
        bound += 2 * HALF_STEP[found.dtype] * expected.double().abs()
        assert_within(found, expected, bound)
        assert_squares(squares, found.double().square().sum((1, 2)), STORED_BOUND)
        nothing, squares = gradient.gradient_and_squares(y, a, place.tile, store=False)
        assert nothing is None
        exact = torch.bmm(y.double().mT, a.double()).square().sum((1, 2))
        assert_squares(squares, exact)
        assert_squares(gradient.gradient_and_squares_plain(y, a, store=False)[1], exact)


def check_weighted_product(place: Place) -> None:
    """Coefficients in any order; samples whose coefficient is zero are not read."""
    for (batch_size, tokens, d, p), layouts in product(place.shapes, place.layouts):
        some = place.coefficients(batch_size)
        for c in (some, torch.ones_like(some), torch.zeros_like(some)) if batch_size else ():
            y, a = place.normal(batch_size, tokens, d, seed=1), place.normal(batch_size, tokens, p)
            y, a = lay_out(poison(y, c), layouts[0]), lay_out(poison(a, c), layouts[1])
            found = weighted_product.weighted_product(y, a, SortedCoefficients.of(c), place.tile)
            expected = weighted_product.weighted_product_plain(y, a, c)
            assert found.dtype == torch.float32
            magnitude = weighted_product.weighted_product_plain(y.abs(), a.abs(), c)
            assert_within(found, expected, SUM_BOUND[place.dtype] * magnitude.double())


def check_weighted_product_of_nothing(place: Place) -> None:
    """The weights of an empty batch are never formed: the kernel is not asked for them."""
    y, a = place.normal(0, 4, 8), place.normal(0, 4, 16)
    found = weighted_product.weighted_product(y, a, None, place.tile)
    assert torch.equal(found, torch.zeros(8, 16, device=place.device))


def check_weighted_sum(place: Place) -> None:
    """Few samples and many, whose loads are not unrolled, in several shapes."""
    many = weighted_sum_file.UNROLLED + 3
    rows = [(1, 1), (2, 5), (3, 7, 11), (many, 2 * weighted_sum_file.BLOCK + 3), (0, 4), (3, 0)]
    for shape in (*rows, *((b, d, p) for b, _, d, p in place.shapes)):
        some = place.coefficients(shape[0])
        for c in (some, torch.zeros_like(some)):
            gradients = poison(place.normal(*shape), c)
            expected = weighted_sum_plain(gradients, c)
            good = torch.where(c > 0, c, 0)
            magnitude = weighted_sum_plain(gradients.abs(), good).double()
            for values in (gradients, gradients.mT.contiguous().mT):
                for weights in (c, torch.stack((c, c - 1), dim=1)[:, 0]):
                    found = weighted_sum(values, weights)
                    assert found.dtype == torch.float32
                    assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)


def check_gram(place: Place) -> None:
    """Several uses in one launch; some share their input; sums of more than one chain."""
    for (batch_size, tokens, d, p), layouts in product(place.shapes, place.layouts):

        def operand(n: int, seed: int, how: str, shape=(batch_size, tokens)) -> Tensor:
            return lay_out(place.normal(*shape, n, seed=seed, shift=0.3), how)

        how_y, how_a = layouts
        uses = [
            (operand(p, 1, how_a), [operand(d, 2, how_y)]),
            (operand(gram.CHUNK + 8, 3, how_a), [operand(n, n, how_y) for n in (8, d, 24)]),
        ]
        found, scale = gram.gram_squares(uses, place.tile)
        expected, expected_scale = gram.gram_squares_plain(uses)
        assert found.shape == (len(uses), batch_size)
        assert_squares(found, expected)
        assert_squares(scale, expected_scale)


def check_gram_that_underflows(place: Place) -> None:
    """What squares below float32's numbers take from a norm is allowed for by its scale."""
    if place.dtype == torch.float16:
        return  # its squares are float32 numbers, all of them
    exponents = [(17, -23), (-23, 17), (18.5, -20), (-30, 12), (5, -30), (0, 0)]
    factors = torch.tensor([[10.0**a, 10.0**y] for a, y in exponents], device=place.device)
    shape = (len(exponents), 5)
    a = (place.normal(*shape, 40).float() * factors[:, :1, None]).to(place.dtype)
    y = (place.normal(*shape, 24, seed=1).float() * factors[:, 1:, None]).to(place.dtype)
    squares, scale = (x[0].double() for x in gram.gram_squares([(a, [y])], place.tile))
    true = torch.bmm(y.double().mT, a.double()).square().sum((1, 2))
    bounds = squares.clamp_min(0) + GRAM_ROUNDING * scale.square()
    assert (bounds.nan_to_num(nan=torch.inf) >= true * (1 - 1e-5)).all(), "NaN is no norm either"
    ordinary = (a[-1].double().norm(dim=1) * y[-1].double().norm(dim=1)).sum()
    torch.testing.assert_close(scale[-1], ordinary, rtol=1e-5, atol=0)


def check_norm_layers(place: Place) -> None:
    """With and without mean and bias, of one program a sample and of several pieces; what shares a
    launch changes no bit."""
    block = norm_layer_gradients.BLOCK
    steps = norm_layer_gradients.LEAST_STEPS * norm_layer_gradients.ELEMENTS
    tokens = 2 * steps // block + 7
    shapes = [*place.shapes, (2, tokens, block + 5, 0), (1, tokens, block, 0)]
    uses = []
    for (batch_size, tokens, d, _), layouts in product(shapes, place.layouts):
        x = lay_out(place.normal(batch_size, tokens, d, seed=1, shift=0.5), layouts[0])
        y = lay_out(place.normal(batch_size, tokens, d, seed=2, shift=0.1), layouts[1])
        mean = x.double().mean(2).float()
        variance = (x.double() - mean[..., None]).square().mean(2)
        rstd = (variance + 1e-2).rsqrt().float().t().contiguous().t()
        uses.append(Normalized(y, x, rstd))
        uses.append(Normalized(y, x, rstd, mean, layouts[0] != "contiguous"))
        uses.append(Normalized(2 * y, x, rstd))
    alone = [norm_layer_gradients.norm_layer_gradients([use])[0] for use in uses]
    for use, found, by_itself in zip(
        uses, norm_layer_gradients.norm_layer_gradients(uses), alone, strict=True
    ):
        expected = norm_layer_gradients.norm_layer_gradients_plain(use)
        x, y, rstd = use.x.double(), use.y.double(), use.rstd.double()[..., None]
        shift = 0 if use.mean is None else use.mean.double().abs()[..., None]
        magnitudes = ((y.abs() * (x.abs() + shift) * rstd).sum(1), y.abs().sum(1))
        assert (found[1] is None) == (expected[1] is None) == (not use.with_bias)
        for f, e, one, magnitude in zip(found, expected, by_itself, magnitudes, strict=True):
            if f is not None:
                assert f.dtype == torch.float32
                assert torch.equal(f, one)
                assert_within(f, e, SUM_BOUND[torch.float32] * magnitude)
                if y.shape[1] > 1:
                    assert_squares(f.square().sum(1), e.double().square().sum(1))


def check_norm_layers_of_two_dtypes(place: Place) -> None:
    """Under autocast inputs may be wider than output gradients."""
    y, x = place.normal(2, 20, 24, seed=1), place.normal(2, 20, 24, seed=2).float() / 3
    use = Normalized(y, x, torch.ones(2, 20, device=place.device))
    found, _ = norm_layer_gradients.norm_layer_gradients([use])[0]
    expected, _ = norm_layer_gradients.norm_layer_gradients_plain(use)
    assert_squares(found.square().sum(1), expected.double().square().sum(1))


def token_cases(place: Place) -> Iterator[tuple[Tensor, Tensor, int]]:
    """ids, y and the vocabulary: from all tokens equal to all distinct; in several layouts."""
    rows, block = embedding.ROWS, embedding.BLOCK
    cases = [(*shape[:3], (50, 5, 1000)[n % 3]) for n, shape in enumerate(place.shapes)]
    cases += [(2 * rows + 1, 2, 5, 2), (2, rows, 3, 2), (2, 2 * rows + 1, block + 5, 3)]
    for n, (batch_size, tokens, d, vocabulary) in enumerate(cases):
        seeded = torch.Generator().manual_seed(n)
        ids = torch.randint(vocabulary - 1, (batch_size, tokens), generator=seeded)
        ids = (ids, ids.t().contiguous().t(), ids.int())[n % 3]
        y = place.normal(batch_size, tokens, d, seed=n)
        layout = ("contiguous", "shifted", "time_major", "transposed")[n % 4]
        yield ids.to(place.device), lay_out(y, layout), vocabulary
    distinct = torch.randperm(24, generator=torch.Generator().manual_seed(9)).view(4, 6)
    yield distinct.to(place.device), place.normal(4, 6, 7), 25


def check_token_sums(place: Place) -> None:
    """Norms and sums; samples whose coefficient is zero are not read."""
    for ids, y, vocabulary in token_cases(place):
        c = place.coefficients(len(ids))
        poisoned = poison(y, c)
        sums = TokenSums.of(ids, poisoned)
        assert_squares(sums.squares[::2], embedding.token_squares_plain(ids, y)[::2])
        assert not (y.numel() and sums.squares[1::2].isfinite().any())
        found = sums.weighted_sum(torch.stack((c, c - 1), dim=1)[:, 0], vocabulary)
        assert found.dtype == torch.float32
        expected = embedding.weighted_tokens_plain(ids, y, c, vocabulary)
        magnitude = embedding.weighted_tokens_plain(ids, y.abs(), c, vocabulary).double()
        assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)
        assert not found[vocabulary - 1].any(), "a row without tokens"


def check_token_sums_are_the_same_bits_every_time(place: Place) -> None:
    shape = max((shape[:2] for shape in place.shapes), key=lambda shape: shape[0] * shape[1])
    ids = torch.randint(3, shape, generator=torch.Generator().manual_seed(2)).to(place.device)
    y, c = place.normal(*shape, 33), place.coefficients(len(ids))
    first, *others = [TokenSums.of(ids, y) for _ in range(3)]
    total = first.weighted_sum(c, 4)
    for other in others:
        assert torch.equal(other.squares, first.squares)
        assert torch.equal(other.weighted_sum(c, 4), total)
    assert not first.weighted_sum(0 * c, 4).any()


def check_token_norms_are_those_of_the_sums(place: Place) -> None:
    """Where tokens nearly cancel, the norm is that of what is left after the same rounding."""
    half = place.normal(3, 20, 70, seed=3)
    y = torch.cat((half, -half * (1 + 2.0**-9)), dim=1)
    ids = torch.randint(4, (3, 20), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    ids = ids.to(place.device)
    sums = TokenSums.of(ids, y)
    for i in range(3):
        only = torch.zeros(3, device=place.device)
        only[i] = 1
        own = sums.weighted_sum(only, 4).double().square().sum()
        assert_squares(sums.squares[i], own, STORED_BOUND)


def check_operands(place: Place) -> None:
    """The layouts are what the bodies take them for: both ways of loading are used."""
    aligned, odd = place.normal(2, 40, 40), place.normal(2, 33, 35)
    assert all(is_described(lay_out(aligned, how)) for how in ("contiguous", "time_major"))
    assert is_described(lay_out(odd, "padded"))
    for how in ("transposed", "shifted", "shared"):
        assert not is_described(lay_out(aligned, how))
    assert not is_described(odd)


BODIES = [body for name, body in globals().items() if name.startswith("check_")]


# ---- places --------------------------------------------------------------------------------------


def interpreted(body: Callable[[Place], None]) -> None:
    """Each dtype reads through descriptors and through pointers."""
    tile = Tile(32, 32, 32, 4, 2)
    with poisoned_memory(), patch.object(gram, "CHUNK", 64):
        for n, dtype in enumerate((torch.float32, torch.float16)):
            body(Place("cpu", dtype, tile, SHAPES, LAYOUTS[n::2]))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_the_interpreter(interpreter, body):
    interpreter.run(interpreted, body)


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", SUM_BOUND, ids=str)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_compiled_kernels(body, dtype):
    with poisoned_memory():
        body(Place("cuda", dtype, None, SHAPES + LARGE, LAYOUTS))


@gpu
@needs_gpu
def test_more_elements_than_32_bits_count():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    n = 2**31 + 5
    gradients = torch.empty(2, n, dtype=torch.bfloat16, device="cuda").normal_()
    c = torch.tensor([0.5, 2.0], device="cuda")
    total = weighted_sum(gradients, c)
    for start in (0, 2**30, 2**31 - 500, n - 1000):
        part = gradients[:, start : start + 1000]
        torch.testing.assert_close(total[start : start + 1000], weighted_sum_plain(part, c))
