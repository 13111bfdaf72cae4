"""The random words that batches are made of."""

import numpy as np

from dp_clipping.sampling.words import words

KEY = bytes(range(32))


def test_a_word_has_an_address():
    """More of a stream begin as fewer do; every other argument selects another stream."""
    base = words(KEY, b"sampling", 3, 1000)
    assert base.dtype == np.uint64
    np.testing.assert_array_equal(words(KEY, b"sampling", 3, 100), base[:100])
    others = [
        words(KEY[::-1], b"sampling", 3, 1000),
        words(KEY, b"cyclic", 3, 1000),
        words(KEY, b"sampling", 4, 1000),
    ]
    for other in others:
        assert not np.isin(other, base).any()


def test_streams_of_neighbouring_numbers_do_not_overlap():
    """A batch takes as many words as there are units, and the next one's begin elsewhere."""
    many = np.concatenate([words(KEY, b"sampling", number, 4096) for number in range(8)])
    assert len(np.unique(many)) == len(many)


def test_all_bits_are_used():
    bits = np.unpackbits(words(KEY, b"sampling", 0, 20_000).view(np.uint8)).reshape(-1, 64)
    assert abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
