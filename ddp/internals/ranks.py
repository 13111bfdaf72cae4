"""The ranks of a wrapper, and what they tell each other."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


def gather(
    own: dict[Any, Any], group: dist.ProcessGroup, device: torch.device
) -> list[dict[Any, Any]]:
    """Returns what each rank has under its keys, tensors on the CPU; a collective call."""
    mine = {key: x.to("meta") if isinstance(x, Tensor) else x for key, x in own.items()}
    everyone = told_by_all(mine, group)
    for rank, theirs in enumerate(everyone):
        for key, x in theirs.items():
            if isinstance(x, Tensor):
                sent = torch.empty(x.shape, dtype=x.dtype, device=device)
                if rank == dist.get_rank(group):
                    sent.copy_(own[key])
                dist.broadcast(sent, group=group, group_src=rank)
                theirs[key] = torch.empty_like(x, device="cpu").copy_(sent)  # with its strides
    return everyone
