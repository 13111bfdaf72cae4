"""Gathers what each rank has of a state, for checkpoints of `diloco` and the sharded variants."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.internals.ranks import told_by_all


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
