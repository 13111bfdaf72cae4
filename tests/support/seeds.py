"""Random numbers of tests, which repeat: each test draws the same ones in every run.

What a test draws follows from its name, on ranks too, and so do the keys of private training.
`pytest --seed-offset N` shifts all of them: no outcome may depend on which numbers were drawn.
"""

import functools
import itertools
import random
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d

from ddp_by_hand.lm.rank_pool import Context, RankPool
from tests.support.servers import server_for

_entropy = random.Random(0)  # of its own, so that a key does not follow from `random.seed`
_runs: Iterator[int] = itertools.count()

for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():  # torch.manual_seed would format its caller's stack for each
        _devices.manual_seed_all = lambda seed: None


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


class Ranks(RankPool):
    """A pool of ranks on which a test draws the same numbers in every run.

    Args:
        prepare: what each rank calls before its first function, a module-level function.
        groups_by_all: a function that makes a process group on some of the ranks fails. Groups are
            named by their number: later ones of all ranks would not meet.
    """

    def __init__(
        self, size: int, device_type: str = "cpu", *,
        prepare: Callable[[], None] = replace_entropy, groups_by_all: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(size, device_type, **more)
        self._how = prepare, size if groups_by_all else 0

    def _start(self) -> None:
        with server_for(self.environment):
            super()._start()

    def _send(self, world_size: int, function: Callable, *arguments: Any) -> Sequence[Connection]:
        return super()._send(
            world_size, _repeatable, (of_ranks(), *self._how), function, *arguments
        )


_once = functools.cache(lambda prepare: prepare())


def _repeatable(context: Context, how: tuple, function: Callable, *arguments: Any) -> Any:
    """Calls a function on a rank as `Ranks` says."""
    start, prepare, size = how
    _once(prepare)
    begin(start)
    before = distributed_c10d._world.group_count
    answer = function(context, *arguments)
    by_some = context.world_size < size and distributed_c10d._world.group_count != before
    assert not by_some, (
        f"made a process group on {context.world_size} of the pool's {size} ranks: use "
        "DeviceMesh.from_group(context.group, ..)"
    )
    return answer
