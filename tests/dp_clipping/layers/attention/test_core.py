"""Attention between its projections, written out."""

import pytest
import torch

from dp_clipping.layers.attention.core import Options, attend, fits, merged_mask
from dp_clipping.layers.batch_layout import Layout

L, S, N, E, HEADS = 3, 4, 2, 6, 2


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("add_zeros", [False, True])
def test_each_head_of_each_sequence(need_weights, padded, add_zeros):
    q, k, v = (torch.randn(n, N, E, dtype=torch.float64) for n in (L, S, S))
    forbidden = torch.triu(torch.ones(L, S, dtype=torch.bool), 1)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, 1] = True
    mask = merged_mask(forbidden, padding if padded else None, HEADS, q.dtype)
    options = Options(HEADS, 0.0, need_weights, False, add_zeros)
    y, weights = attend(q, k, v, mask, False, options)
    assert (weights is None) == (not need_weights)
    for n in range(N):
        for h in range(HEADS):
            part = slice(h * E // HEADS, (h + 1) * E // HEADS)
            scores = q[:, n, part] @ k[:, n, part].t() / (E / HEADS) ** 0.5
            scores = scores.masked_fill(forbidden | (padding[n] & padded), -torch.inf)
            values = v[:, n, part]
            if add_zeros:
                scores = torch.cat([scores, torch.zeros(L, 1)], 1)
                values = torch.cat([values, torch.zeros(1, E // HEADS)])
            expected = scores.softmax(1)
            torch.testing.assert_close(y[:, n, part], expected @ values)
            if need_weights:
                torch.testing.assert_close(weights[n, h], expected)


def test_weights_are_means_over_heads():
    q = torch.randn(L, N, E)
    by_head, mean = (
        attend(q, q, q, None, False, Options(HEADS, 0.0, True, average, False))[1]
        for average in (False, True)
    )
    torch.testing.assert_close(mean, by_head.mean(1))


def test_masks_that_are_numbers_are_added():
    mask, padding = torch.randn(L, S), torch.randn(N, S)
    found = merged_mask(mask, padding, HEADS, torch.float32)
    assert torch.equal(found[HEADS], mask + padding[1])
    assert merged_mask(None, None, HEADS, torch.float32) is None
    assert merged_mask(mask, None, HEADS, torch.float32).shape == (1, L, S)


def test_each_sample_has_sequences_of_its_own_or_not():
    own, other, shared = Layout(), Layout("dimension", 1), Layout("shared")
    assert fits(True, {(3, 3, 3, 2): (own, own, own, shared)})
    assert fits(False, {(3, 3, 3): (other, other, other)})
    assert not fits(True, {(3, 3, 3): (other, other, other)})
    assert not fits(True, {(3, 3, 3): (shared, own, own)})
    assert not fits(True, {(2, 2, 2): (own, own, own)})
