"""Wraps what the course uses of PyTorch without a public name, one function each.

Everything here is tested with `torch_versions.TESTED`; where these differ, the function says since
which. Where another version lacks one of these interfaces, its function does without, or raises a
RuntimeError that names it; for `Tensor._version` the import does.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ddp_by_hand.torch_versions import RANGE, warn_if_untested

warn_if_untested()


def missing(api: str) -> RuntimeError:
    return RuntimeError(f"torch {torch.__version__} has no {api}, needed here: use torch {RANGE}")


def found(owner: Any, name: str, path: str) -> Any:
    """Returns an attribute of `owner`, of which `name` is that in messages.

    Raises:
        RuntimeError: if it has none.
    """
    try:
        return attrgetter(path)(owner)
    except AttributeError as error:
        raise missing(f"{name}.{path}") from error


found(Tensor, "Tensor", "_version")  # `version_of` has no frame of Python that could say it
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns the number of in-place changes of a tensor, which is asked twice for each gradient."""


def own(module: nn.Module, kind: str) -> dict[str, Any]:
    """Returns the dict that holds a module's own "parameters", "buffers" or "modules".

    These are `Module._parameters` and so on. `named_parameters` leaves out a tensor that stands in
    a parameter's place a second time.
    """
    return found(module, "Module", f"_{kind}")


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward that is running now has finished.

    `torch.autograd.graph.queue_callback`, public since torch 2.15, and before
    `Variable._execution_engine.queue_callback`, which PyTorch's own DDP and FSDP use.
    """
    queue = getattr(torch.autograd.graph, "queue_callback", None)
    if queue is None:
        queue = found(Variable, "Variable", "_execution_engine.queue_callback")
    queue(callback)


def not_in_tree(tensors: Iterable[Tensor], value: Any) -> list[Tensor]:
    """Returns those that PyTorch's DDP does not find in an output, `torch.utils._pytree`."""
    found = {id(leaf) for leaf in tree_leaves(value)}
    return [x for x in tensors if id(x) not in found]


def ddp_record(wrapper: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """Returns DDP's record of its buckets, `_get_ddp_logging_data()`; else {}."""
    return getattr(wrapper, "_get_ddp_logging_data", dict)()


def divide_first(op: Any, group: dist.ProcessGroup, *tensors: Tensor) -> Any:
    """Divides `tensors` where a mean would divide their sum; returns the collective's operation.

    The sum of float16 gradients may overflow where their mean does not, so PyTorch's DDP divides
    first. NCCL's average does so itself; gloo has none, or divides the sum.
    """
    if op != dist.ReduceOp.AVG or (tensors[0].is_cuda and group.name() == dist.Backend.NCCL):
        return op  # dist.get_backend() is slow
    for x in tensors:
        x.div_(group.size())
    return dist.ReduceOp.SUM


def coalesced_all_reduce(tensors: list[Tensor], op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Starts one grouped all-reduce of `tensors` (one dtype, in place); `.wait()` on the result.

    torch has no public function for this that is not deprecated: `dist.all_reduce_coalesced` is,
    and its successor is a private context manager. The process group's own method is what both
    call, with NCCL and gloo.
    """
    run = found(group, "ProcessGroup", "allreduce_coalesced")
    options = found(dist, "torch.distributed", "AllreduceCoalescedOptions")()
    options.reduceOp = divide_first(op, group, *tensors)
    options.asyncOp = True
    return run(tensors, options)


def reduce_scatter(own: Tensor, flat: Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Starts to reduce `flat` [W n] over ranks, of which rank r gets the r-th slice in `own` [n].

    `own` may be that slice of `flat`. torch 2.13 has renamed `dist.reduce_scatter_tensor`; 2.13 and
    2.14 warn of the old name, 2.15 does not.
    """
    op = divide_first(op, group, flat)
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return run(own, flat, op=op, group=group, async_op=True)


def all_gather(flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to write every rank's `own` [n] to `flat` [W n], where `own` may be this rank's slice.

    torch 2.13 has renamed `dist.all_gather_into_tensor`, as `reduce_scatter` says.
    """
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(flat, own, group=group, async_op=True)


def symmetric_memory() -> ModuleType:
    """Returns `torch.distributed._symmetric_memory`: private in name, documented all the same."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise missing("torch.distributed._symmetric_memory") from error
    return _symmetric_memory


def in_backward() -> bool:
    """Returns whether autograd is running a backward in this thread."""
    return number_of_backward() != -1


def number_of_backward() -> int:
    """Returns the number of the backward that runs in this thread, -1 if none does.

    `torch._C._current_graph_task_id()`, which PyTorch's activation checkpointing asks too. A
    backward inside of another one, as reentrant checkpointing runs it, has a number of its own.
    """
    try:
        return torch._C._current_graph_task_id()
    except AttributeError as error:
        raise missing("torch._C._current_graph_task_id") from error


def without_torch_functions() -> AbstractContextManager:
    """Enters a context in which functions of PyTorch treat subclasses of tensors as tensors.

    `torch._C.DisableTorchFunctionSubclass`, which PyTorch's notes on extending it describe.
    """
    return found(torch._C, "torch._C", "DisableTorchFunctionSubclass")()
