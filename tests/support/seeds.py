"""Random numbers of tests, which repeat: each test draws the same ones in every run.

What a test draws follows from its name, on ranks too, and the keys of private training with it.
`pytest --seed-offset N` shifts all of them: no outcome may depend on which numbers were drawn.
"""

import random
import secrets
import zlib
from collections.abc import Callable

import numpy as np
import torch

_entropy = random.Random(0)  # of its own, so that a key does not follow from `random.seed`


def seed_of(name: str, offset: int) -> int:
    """Returns the seed of a test, below 2³²."""
    return (zlib.crc32(name.encode()) + offset) % 2**32


def begin(seed: int) -> None:
    """Seeds torch, NumPy and Python, and what stands for the operating system's entropy here."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    _entropy.seed(seed)


def replace_entropy(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Draws what this process takes from the operating system's entropy from the test's seed."""
    replace(secrets, "token_bytes", _entropy.randbytes)
    replace(secrets, "randbits", _entropy.getrandbits)
