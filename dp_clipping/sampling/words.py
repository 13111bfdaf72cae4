"""The random words that batches are made of, as a function of a secret key alone.

Every sampler takes its words from here. So what replaces the generator replaces it for all.
"""

import hashlib

import numpy as np


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
