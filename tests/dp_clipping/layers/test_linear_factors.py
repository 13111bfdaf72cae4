"""Factors of a linear layer: norms and sums are those of G_i = Σ_t y_it a_itᵀ."""

import pytest
import torch

from dp_clipping.clipping.accumulation import Weights, squared_norms
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.layers import linear_factors
from dp_clipping.layers.linear_factors import Grams, LinearFactors, gram

SHAPES = [(3, 1, 4, 5), (3, 6, 4, 5), (2, 3, 40, 30)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def factors_of(batch, tokens, p, d, dtype=torch.float64, transposed=False) -> LinearFactors:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(batch, tokens, p, generator=draw).to(dtype)
    y = torch.randn(batch, tokens, d, generator=draw).to(dtype)
    return LinearFactors(a, y, transposed)


def exact(factors: LinearFactors) -> torch.Tensor:
    g = torch.einsum("btd,btp->bdp", factors.y.double(), factors.a.double())
    return g.mT if factors.transposed else g


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_sums(dtype, shape, transposed):
    factors = factors_of(*shape, dtype, transposed)
    g = exact(factors)
    torch.testing.assert_close(factors.dense().double(), g, rtol=1e-5, atol=1e-4)
    norm = factors.norm()
    scale = 0 if norm.scale is None else norm.scale.double().square() * norm.gram_error
    error = (norm.squared.double() - g.square().sum((1, 2))).abs()
    assert (error <= 1e-5 * g.square().sum((1, 2)) + scale).all()
    c = torch.linspace(0, 1, shape[0], dtype=norm.squared.dtype)
    found = factors.weighted_sum(Weights(c, c.tolist()))
    torch.testing.assert_close(
        found.double(), torch.einsum("b,bij->ij", c.double(), g), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("elements", [1, 50, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_normed_is_what_is_summed_to_the_last_bit(dtype, elements, monkeypatch):
    """However many samples are formed at a time: 1, 2 of 20 numbers, all."""
    formed = []
    real = linear_factors.wide_bmm

    def counted(*operands):
        formed.append(len(operands[0]))
        return real(*operands)

    monkeypatch.setattr(linear_factors, "PIECE_ELEMENTS", elements)
    monkeypatch.setattr(linear_factors, "wide_bmm", counted)
    factors = factors_of(5, 6, 4, 5, dtype)
    norm = factors.norm()
    assert formed == {1: [1] * 5, 50: [2, 2, 1], 1 << 20: [5]}[elements]
    for i in range(5):
        c = torch.zeros(5, dtype=dtype)
        c[i] = 1.0
        alone = factors.weighted_sum(Weights(c, c.tolist()))
        assert torch.equal(squared_norms(alone[None]), norm.squared[i : i + 1])


def test_one_token_has_no_cross_terms_and_several_have():
    factors = factors_of(2, 3, 4, 5)
    apart = (factors.y.square().sum(2) * factors.a.square().sum(2)).sum(1)
    assert not torch.isclose(factors.norm().squared, apart).any()
    one = factors_of(2, 1, 4, 5)
    product = one.y.square().sum((1, 2)) * one.a.square().sum((1, 2))
    torch.testing.assert_close(one.norm().squared, product)


def test_tokens_that_cancel_have_an_allowance_in_16_bit():
    half = factors_of(2, 8, 40, 30, torch.bfloat16)
    a = torch.cat([half.a, half.a], 1)
    factors = LinearFactors(a, torch.cat([half.y, -half.y], 1), False)
    norm = factors.norm()
    assert norm.gram_error == GRAM_ROUNDING
    assert (norm.scale > 0).all()
    assert (norm.squared.abs() <= GRAM_ROUNDING * norm.scale.square()).all()


def test_gram_matrices_are_shared_by_layers_that_read_the_same():
    a, grams = torch.randn(2, 3, 4).bfloat16(), Grams()
    first = grams.of(a)
    torch.testing.assert_close(first, gram(a))
    assert grams.of(a) is first
    assert grams.of(a.clone()) is not first
    torch.testing.assert_close(grams.of(2 * a), 4 * first)


def test_several_uses_are_joined_and_cross_terms_are_in_the_norm():
    uses = [factors_of(3, tokens, 4, 5) for tokens in (1, 3, 2)]
    one = factors_of(3, 2, 5, 4, transposed=True)
    joined = LinearFactors.joined([*uses, one])
    total = sum(use.dense() for use in (*uses, one))
    torch.testing.assert_close(joined.dense(), total)
    torch.testing.assert_close(joined.norm().squared, total.square().sum((1, 2)))


def test_some_samples():
    factors = factors_of(3, 2, 4, 5)
    torch.testing.assert_close(exact(factors.select(slice(1, 3))), exact(factors)[1:])
    factors.a[0], factors.y[0] = torch.inf, torch.nan
    part = exact(factors.only(torch.tensor([False, True, True])))
    assert torch.equal(part[1:], exact(factors)[1:])
    assert not part[0].any()
    assert factors.nbytes == factors.a.nbytes + factors.y.nbytes
