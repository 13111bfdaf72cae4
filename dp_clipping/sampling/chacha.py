"""ChaCha20, a cryptographic generator of random words addressed by a counter (RFC 8439).

Whoever does not have the key cannot tell its words from uniform ones, nor compute one from others:
the assumption on which TLS rests. `noise.secure.kernel` has the same in Triton.
"""

from typing import Any

import numpy as np

KEY_BYTES = 32
WORDS = 16  # of a block
DOUBLE_ROUNDS = 10
CHUNK = 1 << 13  # blocks made at once: a row of the state fits the second-level cache
TURNS: list[np.ndarray] = [(np.arange(4) + n) % 4 for n in range(4)]
CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")

Words = Any  # uint32 arrays, for mypy, which does not read numpy


def blocks(key: bytes, counters: np.ndarray, nonce: tuple[int, int] = (0, 0)) -> Words:
    """Returns the blocks of ChaCha20 with these counters: uint32 [16, n].

    Args:
        key: 32 bytes.
        counters: [n], uint64. The low half is the block counter of RFC 8439, section 2.3, and the
            high half the first word of its nonce, so one key has 2⁶⁴ blocks.
        nonce: the other two words of the nonce.

    Raises:
        ValueError: for a key of another length.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of ChaCha20 has {KEY_BYTES} bytes, not {len(key)}")
    found: Words = np.empty((WORDS, len(counters)), np.uint32)
    for begin in range(0, len(counters), CHUNK):
        part = slice(begin, begin + CHUNK)
        found[:, part] = _chunk(key, counters[part], nonce)
    return found


def words(key: bytes, count: int, bits: int) -> Words:
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
