"""The largest and smallest numbers: squares that under- or overflow never let a sample exceed C.

One batch holds a grid of magnitudes: sample i has inputs (or outputs) of its own, so that its part
of the clipped sum is its own entries of `.grad`, and is measured in float64.
"""

import itertools

import pytest
import torch
from torch import nn

from dp_clipping.clipping.accumulation import norms, product_squares
from dp_clipping.clipping.coefficients import HIGHEST, LOWEST, coefficients
from dp_clipping.clipping.norms import GRAM_ROUNDING, UNDERFLOW
from dp_clipping.distributed.norm_reduce import NormReducer, SplitNorms
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from tests.dp_clipping.conftest import MODES, clipped_sums, private, unchecked
from tests.support import zoo
from tests.support.turns import in_turn

ABOVE = 1 + 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRID = list(itertools.product((-40, -30, -23, -18, -12, -5, 0, 5, 12, 18, 19.23, 30, 38), repeat=2))
WIDTH = 2  # features of a sample's own
every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])


class Channels(nn.Conv1d):
    """A convolution over channels alone, which runs under vmap: [B, T, p] -> [B, T, d]."""

    def forward(self, x):
        return super().forward(x.mT).mT


def magnitudes(which: int) -> torch.Tensor:
    return torch.tensor([10.0 ** pair[which] for pair in GRID], dtype=torch.float64)


def spread(values: torch.Tensor) -> torch.Tensor:
    """[B, T, WIDTH] -> [B, T, B * WIDTH]: each sample in a block of its own."""
    batch_size, tokens, width = values.shape
    result = values.new_zeros(batch_size, tokens, batch_size, width)
    for i in range(batch_size):
        result[i, :, i] = values[i]
    return result.flatten(2)


def factors(tokens: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda n: torch.randn(  # noqa: E731
        len(GRID), tokens, n, generator=generator, dtype=torch.float64
    )
    a = draw(WIDTH) * magnitudes(0)[:, None, None]
    y = draw(d) * magnitudes(1)[:, None, None]
    return a.to(dtype), y.to(dtype)


def contributions(gradient: torch.Tensor) -> torch.Tensor:
    """Norm of each sample's block [d, B * WIDTH] -> [B]."""
    return gradient.double().unflatten(-1, (len(GRID), WIDTH)).square().sum((0, 2)).sqrt()


def check(found: torch.Tensor, limit: float, true: torch.Tensor, exact: torch.Tensor, dtype):
    """At most C, and where no square leaves the range of float32 not lazily small either."""
    assert found.isfinite().all()
    worst = int(found.argmax())
    assert found[worst] <= limit * ABOVE, f"{found[worst] / limit} C of {GRID[worst]}"
    slack = 1e-4 if dtype == torch.float32 else 1e-2
    least = true.clamp(max=limit) * (1 - slack)
    assert (found[exact] >= least[exact]).all()
    assert dtype == torch.float16 or exact.sum() > 10


CASES = [
    *itertools.product([nn.Linear], [(1, 3), (3, 3), (3, 200)], [LOWEST, 1e-6, 1.0, 1e6]),
    *itertools.product([Channels], [(1, 3), (3, 3)], [LOWEST, 1.0]),
]


@pytest.mark.parametrize(
    ("case", "style"), in_turn(CASES, {f"{d}-{m}": (d, m) for d in DTYPES for m in MODES}, fast=4)
)
def test_linear_layers(case, style):
    """Of one token, and by dense G, accumulation and (16 bit, 200 outputs) Gram matrices."""
    (kind, (tokens, d), limit), (dtype, mode) = case, style
    a, y = factors(tokens, d, dtype)
    true = torch.bmm(y.double().mT, a.double()).flatten(1).norm(dim=1)
    more = (d,) if kind is nn.Linear else (d, 1)
    net = kind(len(GRID) * WIDTH, *more, bias=False).to(dtype)
    nn.init.zeros_(net.weight)
    model = unchecked(net, mode, limit)
    (gradient,) = clipped_sums(model, (spread(a), y)).values()
    entries = torch.stack([true, *(x.double().flatten(1).norm(dim=1) for x in (a, y))])
    lowest, highest = (1e-2, 1e4) if dtype == torch.float16 else (1e-15, 1e15)
    exact = (entries < highest).all(0) & (entries > lowest).all(0)
    if mode == "bookkeeping" and dtype == torch.float16:
        exact &= true < 1e3 * limit  # else y scaled by c is below the numbers of float16
    check(contributions(gradient.view(d, -1)), limit, true, exact, dtype)


@pytest.mark.parametrize("limit", [LOWEST, 1.0])
@pytest.mark.parametrize("layer", ["embedding", "bias", "layer_norm"])
@every_dtype
@every_mode
def test_sums_of_output_gradients(mode, dtype, layer, limit):
    y = factors(3, WIDTH, dtype)[1]
    tokens, width = 3, len(GRID) * WIDTH
    if layer == "embedding":
        net, x = nn.Embedding(len(GRID), WIDTH), torch.arange(len(GRID))[:, None].expand(-1, tokens)
    else:
        net = nn.Linear(1, width) if layer == "bias" else nn.LayerNorm(width)
        net.weight.requires_grad_(layer != "bias")
        inputs = 1 if layer == "bias" else width
        x, y = torch.randn(len(GRID), tokens, inputs).to(dtype), spread(y)
    model = unchecked(net.to(dtype), mode, limit)
    sums = clipped_sums(model, (x, y))
    if layer == "embedding":
        (gradient,) = sums.values()
        found = gradient.double().norm(dim=1)
    else:
        found = torch.stack([contributions(g[None]) for g in sums.values()]).norm(dim=0)
    assert found.isfinite().all()
    assert found.max() <= limit * ABOVE
    assert found.max() >= limit * 0.98


@pytest.mark.parametrize("clipping_function", ["abadi", "automatic"])
@every_dtype
@every_mode
def test_per_layer_and_both_functions(mode, dtype, clipping_function):
    a, y = factors(1, 3, dtype)
    net = nn.Linear(len(GRID) * WIDTH, 3, bias=False).to(dtype)
    nn.init.zeros_(net.weight)
    options = {"clipping": "per_layer", "clipping_function": clipping_function}
    model = unchecked(net, mode, 1e-6, **options)
    (gradient,) = clipped_sums(model, (spread(a), y)).values()
    found = contributions(gradient)
    assert found.isfinite().all()
    assert found.max() <= 1e-6 * ABOVE


@pytest.mark.parametrize("mode", ["ghost", "bookkeeping"])
def test_a_square_that_vanishes_beside_a_large_one(mode):
    """(1.7e19)² is a number and (2e-23)² is none: their product was zero, and the sample whole."""
    model = private(zoo.linear(1, 1), mode, 1e-6)
    x, y = torch.full((1, 1, 1), 1.7e19), torch.full((1, 1, 1), 2e-23)
    (gradient,) = clipped_sums(model, (x, y)).values()
    assert 0.999e-6 <= float(gradient.abs()) <= 1e-6 * ABOVE


def test_norms_of_every_number():
    numbers = torch.tensor([5e-324, 1e-310, 1e-200, 1e-160, 1.0, 1e155, 1e300], dtype=torch.float64)
    torch.testing.assert_close(
        norms(numbers[:, None].expand(-1, 4)), 2 * numbers, rtol=1e-15, atol=0
    )
    assert norms(torch.zeros(2, 3)).tolist() == norms(torch.zeros(2, 0).double()).tolist() == [0, 0]
    assert not norms(torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0]])).isfinite().any()
    small, large = (torch.full((1, 1), x, dtype=torch.float64) for x in (1e-200, 1e150))
    assert float(product_squares(small, large)) == pytest.approx(1e-100)
    assert product_squares(small, large * 1e10).item() == torch.inf


def test_automatic_coefficients_are_numbers():
    found = coefficients(torch.zeros(1, 2), torch.tensor([HIGHEST]), "automatic", LOWEST)
    assert found.isfinite().all()


def test_what_gram_matrices_lose_is_in_their_scale():
    """u² ε covers twice what is lost: see norms.py."""
    assert UNDERFLOW**2 * GRAM_ROUNDING >= 4


def test_an_adaptive_threshold_stays_within():
    threshold = AdaptiveThreshold(1e-9, expected_batch_size=4, learning_rate=5.0, count_std=0.0)
    for step in range(9):
        threshold.update(torch.zeros(1, 4), step=step, noise_key=bytes(32))
    assert threshold.clip_norms == [LOWEST]


def test_replicas_of_a_vanishing_norm_are_the_same():
    """float32 rounds such squares by a thousandth and more: ranks do not differ by that."""
    norms_of_ranks = SplitNorms(NormReducer(), None)
    for shared, differs in ((1e-42, False), (1.0, True)):
        total = torch.tensor([shared, shared, shared, shared / 90, 0.0]).view(5, 1, 1)
        bounds = norms_of_ranks.unpack(total)[1]
        assert (not bounds.isfinite().all()) == differs
