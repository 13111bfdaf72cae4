"""Sums over equal tokens, against the reference implementation in float64."""

from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from dp_clipping.kernels import embedding
from dp_clipping.kernels.embedding import Tokens, TokenSums, token_sums
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
    cases += [(2 * embedding.MOST_ROWS + 1, 2, 5, 2), (2, rows, 3, 2)]
    cases += [(2, 2 * rows + 1, block + 5, 3)]
    for n, (batch_size, tokens, d, vocabulary) in enumerate(cases):
        seeded = torch.Generator().manual_seed(n)
        ids = torch.randint(vocabulary - 1, (batch_size, tokens), generator=seeded)
        ids = (ids, ids.t().contiguous().t(), ids[:1].expand(batch_size, -1))[n % 3]
        y = place.normal(batch_size, tokens, d, seed=n)
        layout = ("contiguous", "shifted", "time_major", "transposed")[n % 4]
        yield ids.to(place.device), lay_out(y, layout), vocabulary
    distinct = torch.randperm(24, generator=torch.Generator().manual_seed(9)).view(4, 6)
    yield distinct.to(place.device), place.normal(4, 6, 7), 25


def alone(ids: Tensor, y: Tensor, vocabulary: int = 5) -> TokenSums:
    """The sums of one use."""
    ((numbers, sums),) = token_sums([Tokens(ids, y, vocabulary)], len(ids))
    assert numbers == [0]
    return sums


def total_of(sums: TokenSums, c: Tensor) -> Tensor:
    """The total of its only use."""
    (total,) = sums.weighted_sums([0], c[None], [0])
    return total


def assert_total(found: Tensor, ids: Tensor, y: Tensor, c: Tensor, vocabulary: int) -> None:
    assert found.dtype == torch.float32
    expected = embedding.weighted_tokens_plain(ids, y, c, vocabulary)
    magnitude = embedding.weighted_tokens_plain(ids, y.abs(), c, vocabulary).double()
    assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)


@on_kernels()
def test_token_sums(place: Place) -> None:
    """Norms and sums; samples whose coefficient is zero are not read."""
    for ids, y, vocabulary in token_cases(place):
        c = place.coefficients(len(ids))
        poisoned = poison(y, c)
        sums = alone(ids, poisoned, vocabulary)
        (squares,) = sums.squares
        assert_squares(squares[::2], embedding.token_squares_plain(ids, y)[::2])
        assert not (y.numel() and squares[1::2].isfinite().any())
        (found,) = sums.weighted_sums([0], torch.stack((c - 1, c)), [1])
        assert_total(found, ids, y, c, vocabulary)
        assert not found[vocabulary - 1].any(), "a row without tokens"


@on_kernels()
def test_token_sums_are_the_same_bits_every_time(place: Place) -> None:
    shape = max((shape[:2] for shape in place.shapes), key=lambda shape: shape[0] * shape[1])
    ids = torch.randint(3, shape, generator=torch.Generator().manual_seed(2)).to(place.device)
    y, c = place.normal(*shape, 33), place.coefficients(len(ids))
    first, *others = [alone(ids, y, 4) for _ in range(3)]
    total = total_of(first, c)
    for other in others:
        assert torch.equal(other.squares, first.squares)
        assert torch.equal(total_of(other, c), total)
    assert not total_of(first, 0 * c).any()


@on_kernels()
def test_token_norms_are_those_of_the_sums(place: Place) -> None:
    """Where tokens nearly cancel, the norm is that of what is left after the same rounding."""
    half = place.normal(3, 20, 70, seed=3)
    y = torch.cat((half, -half * (1 + 2.0**-9)), dim=1)
    ids = torch.randint(4, (3, 20), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    ids = ids.to(place.device)
    sums = alone(ids, y, 4)
    for i in range(3):
        only = torch.zeros(3, device=place.device)
        only[i] = 1
        own = total_of(sums, only).double().square().sum()
        assert_squares(sums.squares[0, i], own, STORED_BOUND)


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
        use = Tokens(ids[is_there][:, None], rows[:, None], 5, samples)
        ((_, sums),) = token_sums([use], batch_size)
        assert_squares(sums.squares[0], embedding.token_squares_plain(ids, y))
        assert_total(total_of(sums, c), ids, y, c, 5)


def tables(place: Place, batch_size: int) -> list[Tokens]:
    """Uses of many widths, lengths, layouts and vocabularies; one without tokens, one ragged."""
    block, found = embedding.BLOCK, []
    widths = (3, 16, 4, 48, 16, 1, block + 5, 16, 33, 3)
    for n, d in enumerate(widths):
        tokens, vocabulary = (2, 5, 0, 1)[n % 4], (7, 2, 40)[n % 3]
        seeded = torch.Generator().manual_seed(n)
        ids = torch.randint(vocabulary, (batch_size, tokens), generator=seeded).to(place.device)
        y = place.normal(batch_size, tokens, d, seed=n)
        if n == 4:  # one row for all tokens, as of a bag
            y = place.normal(batch_size, 1, d).expand(-1, tokens, -1)
        found.append(
            Tokens(ids, lay_out(y, ("contiguous", "shifted", "transposed")[n % 3]), vocabulary)
        )
    samples = torch.arange(batch_size, device=place.device).repeat_interleave(2)[1:]
    ids = torch.arange(len(samples), device=place.device)[:, None] % 3
    return [*found, Tokens(ids, place.normal(len(samples), 1, 16), 3, samples)]


@on_kernels()
def test_what_is_found_of_a_use_does_not_depend_on_the_others(place: Place) -> None:
    """Each is, to the last bit, what it is alone, in whichever launch; c differs by use."""
    batch_size = 5
    uses = tables(place, batch_size)
    c = place.coefficients(batch_size)
    c = torch.stack((c, c.flip(0)))
    with patch.object(embedding, "MOST", 4):
        found = token_sums(uses, batch_size)
    assert sorted(n for numbers, _ in found for n in numbers) == list(range(len(uses)))
    assert len(found) < len(uses) - 2, "launches are shared"
    for numbers, sums in found:
        some = list(range(len(numbers)))[::-1][: max(1, len(numbers) - 1)]  # not all at once
        rows = [numbers[k] % 2 for k in some]
        totals = sums.weighted_sums(some, c, rows)
        for k, row, total in zip(some, rows, totals, strict=True):
            use = uses[numbers[k]]
            ((_, own),) = token_sums([use], batch_size)
            assert torch.equal(own.squares[0], sums.squares[k])
            (expected,) = own.weighted_sums([0], c, [row])
            assert total.shape == (use.vocabulary, use.y.shape[2])
            assert torch.equal(expected, total)
            if use.samples is None:
                assert_squares(sums.squares[k], embedding.token_squares_plain(use.ids, use.y))
                assert_total(total, use.ids, use.y, c[row], use.vocabulary)


@on_kernels((torch.float32,))
def test_launches_of_hundreds_of_uses(place: Place) -> None:
    """More than one launch has; of samples with c = 0 nothing is read."""
    ids = torch.tensor([[1], [0], [1]], device=place.device)
    c = place.coefficients(3)
    ys = [place.normal(3, 1, 2, seed=n) for n in range(embedding.MOST + 3)]
    found = token_sums([Tokens(ids, poison(y, c), 2) for y in ys], 3)
    assert [len(numbers) for numbers, _ in found] == [embedding.MOST, 3]
    for numbers, sums in found:
        totals = sums.weighted_sums(range(len(numbers)), c[None], [0] * len(numbers))
        assert torch.stack(totals).isfinite().all()
        for number, total in list(zip(numbers, totals, strict=True))[:: len(numbers) - 1]:
            assert_total(total, ids, ys[number], c, 2)
