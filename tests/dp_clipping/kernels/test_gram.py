"""Norms from Gram matrices, against the reference implementation in float64."""

from itertools import product

import torch
from torch import Tensor

from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels import gram
from tests.support.kernel_cases import Place, assert_squares, lay_out, on_kernels


@on_kernels()
def test_gram(place: Place) -> None:
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


@on_kernels(dtypes=[torch.float32, torch.bfloat16])  # squares of float16 values are float32 numbers
def test_gram_that_underflows(place: Place) -> None:
    """What squares below float32's numbers take from a norm is allowed for by its scale."""
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


@on_kernels(dtypes=[torch.float16, torch.bfloat16])
def test_gram_of_tokens_that_cancel(place: Place) -> None:
    """Half of a sample's tokens undo the other half, in another block: the error is allowed for."""
    batch_size, half = 3, 33
    a = place.normal(batch_size, half, gram.CHUNK + 8, shift=0.3).repeat(1, 2, 1)
    ys = [place.normal(batch_size, half, n, seed=n) for n in (24, 72)]
    ys = [torch.cat([y, -1.004 * y], dim=1) for y in ys]
    ys[1][1] = -ys[1][1]  # nothing cancels between two samples
    true = sum(torch.bmm(y.double().mT, a.double()).square().sum((1, 2)) for y in ys)
    squares, scale = (x[0].double() for x in gram.gram_squares([(a, ys)], place.tile))
    assert (true < 1e-4 * scale.square()).all()
    assert ((squares - true).abs() <= GRAM_ROUNDING * scale.square()).all()


@on_kernels(dtypes=[torch.float32, torch.bfloat16])
def test_gram_of_a_sample_that_is_not_finite(place: Place) -> None:
    """It has no finite norm, and the other samples' norms keep every bit."""
    a, y = place.normal(3, 40, gram.CHUNK + 8), place.normal(3, 40, 72, seed=1)
    before, scales = gram.gram_squares([(a, [y, y])], place.tile)
    for x, value in product((a, y), (torch.nan, torch.inf)):
        kept, x[1, 35, 3] = x[1, 35, 3].clone(), value
        found, scale = gram.gram_squares([(a, [y, y])], place.tile)
        assert not found[0, 1].isfinite()
        assert found[0, ::2].equal(before[0, ::2])
        assert scale[0, ::2].equal(scales[0, ::2])
        x[1, 35, 3] = kept
