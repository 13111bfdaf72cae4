"""ChaCha20 against the vectors of RFC 8439."""

import numpy as np
import pytest

from dp_clipping.sampling import words as module
from dp_clipping.sampling.words import CHUNK, blocks
from dp_clipping.sampling.words import secure_words as words

KEY = bytes(range(32))
# Section 2.3.2: key 00 .. 1f, counter 1, nonce 00:00:00:09:00:00:00:4a:00:00:00:00.
BLOCK = [
    0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3, 0xC7F4D1C7, 0x0368C033, 0x9AAA2204, 0x4E6CD4C3,
    0x466482D2, 0x09AA9F07, 0x05D7C214, 0xA2028BD9, 0xD19C12B5, 0xB94E16DE, 0xE883D0CB, 0x4E3C50A2,
]  # fmt: skip
# Appendix A.1, keystreams with nonce 0 but for vector 5: key, counter, last nonce word, bytes.
VECTORS = [
    (bytes(32), 0, 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
    (bytes(32), 1, 0, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
    (bytes(31) + b"\1", 1, 0, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"),
    (b"\0\xff" + bytes(30), 2, 0,
     "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"),
    (bytes(32), 0, 0x02000000, "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"),
]  # fmt: skip


def test_the_block_of_section_2_3():
    counter = np.array([1 | 0x09000000 << 32], np.uint64)
    assert blocks(KEY, counter, (0x4A000000, 0))[:, 0].tolist() == BLOCK


@pytest.mark.parametrize(("key", "counter", "nonce", "start"), VECTORS)
def test_the_vectors_of_appendix_a(key, counter, nonce, start):
    found = blocks(key, np.array([counter], np.uint64), (0, nonce))
    assert found.T.astype("<u4").tobytes()[:32].hex() == start


def test_blocks_do_not_depend_on_what_else_is_asked_for():
    counters = np.array([0, 5, 2**32 - 1, 2**32, 2**63 + 7], np.uint64)
    together = blocks(KEY, counters)
    for i in range(len(counters)):
        assert (together[:, i : i + 1] == blocks(KEY, counters[i : i + 1])).all()
    assert len({together[:, i].tobytes() for i in range(len(counters))}) == len(counters)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_words_are_the_bytes_of_the_stream_in_order(bits):
    stream = blocks(KEY, np.arange(3, dtype=np.uint64)).T.astype("<u4").tobytes()
    size = bits // 8
    expected = [int.from_bytes(stream[size * i : size * (i + 1)], "little") for i in range(20)]
    assert words(KEY, 20, bits).tolist() == expected
    assert words(KEY, 0, bits).tolist() == []


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_words_cost_the_blocks_that_they_are_in(count, expected, monkeypatch):
    made = []
    monkeypatch.setattr(module, "blocks", lambda *a: made.append(len(a[1])) or blocks(*a))
    assert len(words(KEY, count, 16)) == count
    assert made == [expected]


def test_chunks_join():
    counters = np.arange(CHUNK - 2, 2 * CHUNK + 3, dtype=np.uint64)
    together = blocks(KEY, counters)
    for i in (0, 1, CHUNK - 1, CHUNK, len(counters) - 1):
        assert (together[:, i : i + 1] == blocks(KEY, counters[i : i + 1])).all()
