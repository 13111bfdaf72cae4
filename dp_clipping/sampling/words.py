"""The random words that batches are made of, as a function of a secret key alone.

Every sampler takes its words from here. So what replaces the generator replaces it for all. Those
of `words` are Philox's. Those of `blocks` are ChaCha20's, a cryptographic generator (RFC 8439):
whoever does not have the key cannot tell its words from uniform ones, nor compute one from others:
the assumption on which TLS rests. `noise.secure.kernel` has the same in Triton.
"""

import hashlib
from typing import Any

import numpy as np

WORDS = 16  # of a block
DOUBLE_ROUNDS = 10
CHUNK = 1 << 13  # blocks made at once: a row of the state fits the second-level cache
TURNS: list[np.ndarray] = [(np.arange(4) + n) % 4 for n in range(4)]
CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")

Words = Any  # uint32 arrays, for mypy, which does not read numpy


def words(key: bytes, purpose: bytes, number: int, count: int) -> np.ndarray:
    """Returns the first `count` random words of a stream, uint64.

    Word i is a function of (key, purpose, number, i) alone. Whoever has the key can compute it:
    Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") is counter-based and
    not cryptographic.

    Args:
        key: the sampling key of a run, 32 bytes.
        purpose: keeps apart the streams of different uses, at most 16 bytes.
        number: of a batch or an epoch, 0 or more.
        count: how many words.
    """
    # Noise is keyed by the same kind of secret: the personalisation keeps the streams apart.
    derived = hashlib.blake2b(key=key, person=purpose, digest_size=16).digest()
    # The number is in the counter's second word, and blocks of words count in its first.
    generator = np.random.Philox(key=int.from_bytes(derived, "little"), counter=number << 64)
    return generator.random_raw(count)


def blocks(key: bytes, counters: np.ndarray, nonce: tuple[int, int] = (0, 0)) -> Words:
    """Returns the blocks of ChaCha20 with these counters: uint32 [16, n].

    Args:
        key: 32 bytes.
        counters: [n], uint64. The low half is the block counter of RFC 8439, section 2.3, and the
            high half the first word of its nonce, so one key has 2⁶⁴ blocks.
        nonce: the other two words of the nonce.
    """
    found: Words = np.empty((WORDS, len(counters)), np.uint32)
    for begin in range(0, len(counters), CHUNK):
        part = slice(begin, begin + CHUNK)
        found[:, part] = _chunk(key, counters[part], nonce)
    return found


def secure_words(key: bytes, count: int, bits: int) -> Words:
    """Returns the first `count` words of so many bits (8, 16, 32 or 64) of the key's stream."""
    of_block = 32 * WORDS // bits
    counters: Words = np.arange((count + of_block - 1) // of_block, dtype=np.uint64)
    stream = np.ascontiguousarray(blocks(key, counters).T).astype("<u4", copy=False)
    return stream.view(f"<u{bits // 8}").reshape(-1)[:count]


def _chunk(key: bytes, counters: Words, nonce: tuple[int, int]) -> Words:
    state: Words = np.empty((4, 4, len(counters)), np.uint32)
    state[0] = CONSTANTS[:, None]
    state[1:3] = np.frombuffer(key, dtype="<u4").reshape(2, 4, 1)
    state[3, 0] = counters & np.uint64(0xFFFFFFFF)
    state[3, 1] = counters >> np.uint64(32)
    state[3, 2:] = np.array(nonce, np.uint32)[:, None]
    a, b, c, d = state.copy()
    room = np.empty_like(a)
    for _ in range(DOUBLE_ROUNDS):
        _quarter_rounds(a, b, c, d, room)
        # Rows are turned, so that diagonals become columns, and back.
        b, c, d = b[TURNS[1]], c[TURNS[2]], d[TURNS[3]]
        _quarter_rounds(a, b, c, d, room)
        b, c, d = b[TURNS[3]], c[TURNS[2]], d[TURNS[1]]
    return (np.stack((a, b, c, d)) + state).reshape(WORDS, -1)


def _quarter_rounds(a: Words, b: Words, c: Words, d: Words, room: Words) -> None:
    """Runs the quarter rounds of four columns, in place; each row is uint32 [4, n]."""
    for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        np.add(x, y, out=x)
        np.bitwise_xor(z, x, out=z)
        np.left_shift(z, np.uint32(bits), out=room)
        np.right_shift(z, np.uint32(32 - bits), out=z)
        np.bitwise_or(z, room, out=z)
