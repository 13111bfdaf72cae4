"""Collectives of several tensors in one launch.

A launch costs the host about as much as a small kernel's whole life, and a block of a network has
nine parameters. torch has public functions for one tensor only; the process group's own methods,
without an underscore, take lists. Tried with torch 2.11 and 2.13, NCCL and gloo.
"""

import torch.distributed as dist
from torch import Tensor


def reduce_scatter_together(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Start the sums of all ranks' inputs, of which each keeps the rows of its rank.

    Args:
        outputs: [d / ranks, ..], contiguous, one dtype.
        inputs: [d, ..], contiguous. Both may be read and written until `.wait()` on the result.
    """
    options = dist.ReduceScatterOptions()
    options.asyncOp = True
    run = getattr(group, "reduce_scatter_single_coalesced", None)  # torch 2.13's name for it
    return (run or group.reduce_scatter_tensor_coalesced)(outputs, inputs, options)


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Start the sums of all ranks' tensors, in place: contiguous, one dtype."""
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    return group.allreduce_coalesced(tensors, options)
