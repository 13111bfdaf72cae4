"""Random numbers of tests, which repeat: each test draws the same ones in every run.

What a test draws follows from its name, on ranks too, and so do the keys of private training.
`pytest --seed-offset N` shifts all of them: no outcome may depend on which numbers were drawn.
"""

import itertools
import random
import secrets
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

_entropy = random.Random(0)  # of its own, so that a key does not follow from `random.seed`
_runs: Iterator[int] = itertools.count()


def seed_of(name: str, offset: int) -> int:
    """Returns the seed of a test, below 2³²."""
    return (zlib.crc32(name.encode()) + offset) % 2**32


def begin_test(seed: int) -> None:
    global _runs
    _runs = itertools.count(1)
    begin((seed, 0))


def of_ranks() -> tuple[int, int]:
    """Returns what ranks begin with: this process's seed, and the number of their run in the test.

    Two runs draw the same numbers, but never the same keys.
    """
    return torch.initial_seed(), next(_runs)


def begin(start: tuple[int, int]) -> None:
    """Seeds torch, NumPy and Python, and what stands for the operating system's entropy here."""
    seed, run = start
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    _entropy.seed(f"{seed} {run}")


def replace_entropy(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Draws what this process takes from the operating system's entropy from the test's seed."""
    replace(secrets, "token_bytes", _entropy.randbytes)
    replace(secrets, "randbits", _entropy.getrandbits)


ON_RANKS = {"seed": of_ranks, "begin": begin}  # arguments of a `RankPool`
