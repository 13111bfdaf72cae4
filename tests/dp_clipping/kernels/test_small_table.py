"""Gradients of small tables, against the reference implementation in float64."""

from unittest.mock import patch

import torch

from dp_clipping.kernels import small_table
from dp_clipping.kernels.embedding import Tokens, token_sums
from dp_clipping.kernels.small_table import is_small, table_gradients, table_gradients_plain
from dp_clipping.kernels.squared_norms import squared_norms
from dp_clipping.layers.embedding.module import EmbeddingFactors
from tests.support.kernel_cases import SUM_BOUND, Place, assert_squares, assert_within, on_kernels

# B, T, d, V: one tile, several chunks with a rest, many features, one row, no token, no sample
SHAPES = [
    (2, 64, 16, 16),
    (3, 150, 8, 32),
    (2, 70, 70, 3),
    (1, 8, 5, 1),
    (2, 0, 4, 3),
    (0, 9, 4, 2),
]


@on_kernels()
def test_gradients_of_a_small_table(place: Place) -> None:
    with patch.object(small_table, "CHUNK", 64):
        for n, (batch_size, tokens, d, vocabulary) in enumerate(SHAPES):
            seeded = torch.Generator().manual_seed(n)
            ids = torch.randint(vocabulary, (batch_size, tokens), generator=seeded)
            y = place.normal(batch_size, tokens, d, seed=n)
            ids = ids.to(place.device)
            if n % 2:
                ids, y = ids.int(), y.permute(2, 0, 1).contiguous().permute(1, 2, 0)
            if n == 1:  # all samples share them
                ids = ids[:1].expand(batch_size, -1)
            found = table_gradients(ids, y, vocabulary)
            expected = table_gradients_plain(ids, y, vocabulary)
            magnitude = table_gradients_plain(ids, y.abs(), vocabulary).double()
            assert found.dtype == torch.float32
            assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)
            assert_squares(squared_norms(found), found.double().square().sum((1, 2)).float())


@on_kernels()
def test_ids_outside_of_a_table_count_nowhere(place: Place) -> None:
    ids = torch.tensor([[0, 5, -1, 1, 2, 2, 7, 40]], device=place.device)
    y = place.normal(1, 8, 4)
    found = table_gradients(ids, y, 3)
    y = y.float()  # a sum in 16 bits would be rounded
    expected = torch.stack((y[0, 0], y[0, 3], y[0, 4] + y[0, 5]))
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)


@on_kernels()
def test_results_are_the_same_bits_every_time(place: Place) -> None:
    ids = torch.randint(5, (3, 200), generator=torch.Generator().manual_seed(1)).to(place.device)
    y = place.normal(3, 200, 20)
    with patch.object(small_table, "CHUNK", 64):
        first, *others = [table_gradients(ids, y, 5) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


@on_kernels()
def test_which_tables_are_small(place: Place) -> None:
    """Those of few rows and many tokens; both kinds have the same norms."""
    y = place.normal(2, 64, 8)
    ids = torch.arange(64, device=place.device).expand(2, -1)
    small, large = (EmbeddingFactors(ids % v, y, v).on_kernels() for v in (16, 17))
    assert isinstance(small, torch.Tensor)
    assert isinstance(large, Tokens)
    ((_, other),) = token_sums([Tokens(ids % 16, y, 16)], 2)
    torch.testing.assert_close(squared_norms(small), other.squares[0], rtol=1e-5, atol=0)


def test_a_table_is_small_beside_its_tokens():
    assert is_small(128, 512)
    assert not is_small(129, 10**6)
    assert not is_small(128, 511)
    assert not is_small(0, 8)
