"""Gives names to interfaces of PyTorch for process groups, DTensor and FSDP1 that have none.

`dp_clipping/torch_compat.py` has those of more than one folder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP as ComposableReplica

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

__all__ = ["ComposableReplica"]  # DDP as hooks on a module; FSDP2's replicas are of another class


active_wrapper: Callable[[], nn.Module | None]
active_wrapper = partial(getattr, nn.parallel.DistributedDataParallel, "_active_ddp_module")
"""Returns the `DistributedDataParallel` whose forward is running.

A flag that torch.compile reads too. DDP with the Python reducer sets none.
"""


def reduce_scatter_together(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Starts the sums of all ranks' inputs, of which each keeps the rows of its rank.

    One launch costs the host about as much as a small kernel's whole life, and a block of a network
    has nine parameters. torch has public functions for one tensor only; process groups have methods
    for lists, with NCCL and gloo. torch 2.13 has renamed the method, and keeps the old name.

    Args:
        outputs: [d / ranks, ..], contiguous, one dtype.
        inputs: [d, ..], contiguous. Both may be read and written until `.wait()` on the result.
    """
    run = getattr(group, "reduce_scatter_single_coalesced", None)
    run = run or group.reduce_scatter_tensor_coalesced
    options = dist.ReduceScatterOptions()
    options.asyncOp = True
    return run(outputs, inputs, options)


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Starts the sums of all ranks' tensors, in place: contiguous, one dtype."""
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    return group.allreduce_coalesced(tensors, options)


layout_of: Callable[[DTensor], Any] = attrgetter("_spec")
"""Returns a DTensor's layout, for `with_layout`."""


def with_layout(part: Tensor, layout: Any) -> DTensor:
    """Returns a DTensor of this rank's part and the layout of another DTensor.

    The constructor has no public name; `DTensor.from_local` takes as long as several launches.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(part, layout, requires_grad=False)


USE_FSDP2 = "shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"

fsdp1_handle: Callable[[FullyShardedDataParallel], Any] = attrgetter("_handle")
"""Returns FSDP1's state of a unit's flat parameter; None for a unit without parameters."""

fsdp1_stand_ins: Callable[[Any], list[Any]] = attrgetter("flat_param._tensors")
"""Returns the tensors that stand for a flat parameter's members while it is gathered."""


def fsdp1_gather_in_backward(handle: Any) -> None:
    """Makes the next backward gather, also if it is the second one of a forward."""
    if not handle._needs_pre_backward_unshard:  # read first: an error where there is no such flag
        handle._needs_pre_backward_unshard = True


def fsdp1_free(unit: FullyShardedDataParallel, handle: Any) -> None:
    """Frees the gathered parameters of a unit, as FSDP1 does at the end of a backward.

    Raises:
        RuntimeError: if they are still there, and the next forward would compute with them.
    """
    from torch.distributed.fsdp._runtime_utils import _reshard

    _reshard(unit, handle, free_unsharded_flat_param=True)
    if not handle.needs_unshard():
        raise RuntimeError(
            f"FSDP1 of torch {torch.__version__} has not freed gathered parameters: {USE_FSDP2}"
        )


def fsdp1_end_backward(root: FullyShardedDataParallel) -> None:
    """Runs FSDP1's callback for the end of a whole backward."""
    from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback

    _post_backward_final_callback(root, root)
