"""ChaCha20, a cryptographic generator of random words addressed by a counter (RFC 8439).

Whoever does not have the key cannot tell its words from uniform ones, nor compute one from others:
the assumption on which TLS rests. `noise.secure.kernel` has the same in Triton.
"""

from typing import Any

import numpy as np

KEY_BYTES = 32
WORDS = 16  # of a block
DOUBLE_ROUNDS = 10
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
    state: Words = np.empty((4, 4, len(counters)), np.uint32)
    state[0] = CONSTANTS[:, None]
    state[1:3] = np.frombuffer(key, dtype="<u4").reshape(2, 4, 1)
    state[3, 0] = counters & np.uint64(0xFFFFFFFF)
    state[3, 1] = counters >> np.uint64(32)
    state[3, 2:] = np.array(nonce, np.uint32)[:, None]
    a, b, c, d = state.copy()
    for _ in range(DOUBLE_ROUNDS):
        _quarter_rounds(a, b, c, d)
        # Rows are turned, so that diagonals become columns, and back.
        b, c, d = (np.roll(row, -n, 0) for row, n in ((b, 1), (c, 2), (d, 3)))
        _quarter_rounds(a, b, c, d)
        b, c, d = (np.roll(row, n, 0) for row, n in ((b, 1), (c, 2), (d, 3)))
    return (np.stack((a, b, c, d)) + state).reshape(WORDS, -1)


def words64(key: bytes, count: int) -> np.ndarray:
    """Returns the first `count` words of 64 bits of the key's stream."""
    counters: Words = np.arange((2 * count + WORDS - 1) // WORDS, dtype=np.uint64)
    stream = np.ascontiguousarray(blocks(key, counters).T).astype("<u4", copy=False)
    return stream.view("<u8").reshape(-1)[:count]


def _quarter_rounds(a: Words, b: Words, c: Words, d: Words) -> None:
    """Runs the quarter rounds of four columns, in place; each row is uint32 [4, n]."""
    for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x += y
        z ^= x
        z[...] = (z << np.uint32(bits)) | (z >> np.uint32(32 - bits))
