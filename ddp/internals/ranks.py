"""The ranks of a wrapper, and what they tell each other."""

from typing import Any

import torch.distributed as dist


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    group = group or dist.group.WORLD
    assert group is not None  # there is one, as is_initialized() says
    return group


def told_by_all(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns what each rank has told, an object that can be pickled; a collective call."""
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
