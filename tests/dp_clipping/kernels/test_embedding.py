"""Sums over equal tokens, against the reference implementation in float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dp_clipping.kernels import embedding
from dp_clipping.kernels.embedding import TokenSums
from tests.support.kernel_cases import (
    STORED_BOUND,
    SUM_BOUND,
    Place,
    assert_squares,
    assert_within,
    lay_out,
    on_kernels,
    poison,
)


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


@on_kernels()
def test_token_sums(place: Place) -> None:
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


@on_kernels()
def test_token_sums_are_the_same_bits_every_time(place: Place) -> None:
    shape = max((shape[:2] for shape in place.shapes), key=lambda shape: shape[0] * shape[1])
    ids = torch.randint(3, shape, generator=torch.Generator().manual_seed(2)).to(place.device)
    y, c = place.normal(*shape, 33), place.coefficients(len(ids))
    first, *others = [TokenSums.of(ids, y) for _ in range(3)]
    total = first.weighted_sum(c, 4)
    for other in others:
        assert torch.equal(other.squares, first.squares)
        assert torch.equal(other.weighted_sum(c, 4), total)
    assert not first.weighted_sum(0 * c, 4).any()


@on_kernels()
def test_token_norms_are_those_of_the_sums(place: Place) -> None:
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


@on_kernels()
def test_token_sums_of_samples_with_different_numbers_of_tokens(place: Place) -> None:
    """Compared with samples of one length whose last tokens are zero."""
    for n, (batch_size, tokens, d, _) in enumerate(place.shapes):
        seeded = torch.Generator().manual_seed(n)
        lengths = torch.randint(tokens + 1, (batch_size,), generator=seeded)
        is_there = torch.arange(tokens) < lengths[:, None]
        ids = torch.randint(5, (batch_size, tokens), generator=seeded)
        samples = torch.arange(batch_size).repeat_interleave(lengths).to(place.device)
        is_there, ids = is_there.to(place.device), ids.to(place.device)
        y = place.normal(batch_size, tokens, d, seed=n) * is_there[..., None]
        rows = lay_out(y[is_there][None], ("contiguous", "shifted")[n % 2])[0]
        c = place.coefficients(batch_size)
        sums = TokenSums.of_rows(ids[is_there], samples, rows, batch_size)
        assert_squares(sums.squares, embedding.token_squares_plain(ids, y))
        expected = embedding.weighted_tokens_plain(ids, y, c, 5)
        magnitude = embedding.weighted_tokens_plain(ids, y.abs(), c, 5).double()
        found = sums.weighted_sum(c, 5)
        assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)
