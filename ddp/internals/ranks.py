"""The ranks of a wrapper, and what they tell each other."""

import atexit
import time
from functools import cache
from typing import Any

import torch.distributed as dist


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise RuntimeError("process_group is without this rank: call wrap on its own ranks alone")
    return group


@cache
def leave_time_at_exit() -> None:
    """Makes the interpreter wait a moment before it ends, once a process.

    A thread of gloo takes its lock to let go of tensors, also after a collective was waited for,
    and aborts the process if the interpreter is ending then. The wait makes this rare.
    """
    atexit.register(time.sleep, 0.05)


def told_by_all(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns what each rank has told, an object that can be pickled; a collective call."""
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
