"""Wraps what the course uses of PyTorch without a public name, one function each.

Everything here was checked with torch 2.11, 2.12 and 2.13. Where another version lacks one of these
interfaces, its function does without, or raises a RuntimeError that names it.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

CHECKED = "2.11 to 2.13"


def _missing(api: str) -> RuntimeError:
    return RuntimeError(f"torch {torch.__version__} has no {api}, needed here: use torch {CHECKED}")


def without_versions(_x: Tensor) -> int:
    """Stands for `version_of` where torch does not count changes."""
    raise _missing("Tensor._version")


version_of: Callable[[Tensor], int] = (
    attrgetter("_version") if hasattr(Tensor, "_version") else without_versions
)
"""Returns the number of in-place changes of a tensor; without a frame of Python, as it is asked
twice for each gradient."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the dict that holds a module's own parameters, `Module._parameters`.

    `named_parameters` leaves out a tensor that stands in a parameter's place a second time.

    Raises:
        RuntimeError: if modules have no such dict.
    """
    try:
        return module._parameters
    except AttributeError as error:
        raise _missing("Module._parameters") from error


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dict that holds a module's own buffers, `Module._buffers`.

    Raises:
        RuntimeError: if modules have no such dict.
    """
    try:
        return module._buffers
    except AttributeError as error:
        raise _missing("Module._buffers") from error


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the dict that holds a module's own submodules, `Module._modules`.

    Raises:
        RuntimeError: if modules have no such dict.
    """
    try:
        return module._modules
    except AttributeError as error:
        raise _missing("Module._modules") from error


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward that is running now has finished.

    `Variable._execution_engine.queue_callback`, which PyTorch's own DDP and FSDP use.

    Raises:
        RuntimeError: if there is no such queue.
    """
    try:
        queue = Variable._execution_engine.queue_callback
    except AttributeError as error:
        raise _missing("Variable._execution_engine.queue_callback") from error
    queue(callback)


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies tensors by a number in place, in few launches: `torch._foreach_mul_`.

    Without it, one launch per tensor.
    """
    if (multiply := getattr(torch, "_foreach_mul_", None)) is not None:
        multiply(tensors, factor)
        return
    for x in tensors:
        x.mul_(factor)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors, of another dtype perhaps, in few launches: `torch._foreach_copy_`.

    Without it, one launch per tensor.
    """
    if (copy := getattr(torch, "_foreach_copy_", None)) is not None:
        copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def ddp_record(wrapper: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """Returns DDP's record of its buckets, `_get_ddp_logging_data()`; else {}."""
    record = getattr(wrapper, "_get_ddp_logging_data", None)
    return {} if record is None else record()


def coalesced_all_reduce(tensors: list[Tensor], op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Starts one grouped all-reduce of `tensors` (one dtype, in place); `.wait()` on the result.

    torch has no public function for this that is not deprecated: `dist.all_reduce_coalesced` is,
    and its successor is a private context manager. The process group's own method is what both
    call, with NCCL and gloo.

    Raises:
        RuntimeError: if process groups have no such method.
    """
    try:
        options = dist.AllreduceCoalescedOptions()
        run = group.allreduce_coalesced
    except AttributeError as error:
        raise _missing("ProcessGroup.allreduce_coalesced") from error
    options.reduceOp = op
    options.asyncOp = True
    return run(tensors, options)


def reduce_scatter(own: Tensor, flat: Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Starts to reduce `flat` [W n] over ranks, of which rank r gets the r-th slice in `own` [n].

    `own` may be that slice of `flat`. torch 2.13 has renamed `dist.reduce_scatter_tensor`.
    """
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return run(own, flat, op=op, group=group, async_op=True)


def all_gather(flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to write every rank's `own` [n] to `flat` [W n], where `own` may be this rank's slice.

    torch 2.13 has renamed `dist.all_gather_into_tensor`.
    """
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(flat, own, group=group, async_op=True)


def gather_on_hosts(everyone: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to write every rank's `own` [n] to `everyone` [W, n], both on the CPU."""
    if (beside := gloo_beside(group)) is None:
        return all_gather(everyone.view(-1), own, group)
    return beside.allgather([[*everyone]], [own])


_beside: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def gloo_beside(group: dist.ProcessGroup) -> Any:
    """Returns gloo for the ranks of a group that has no backend for CPU tensors; else None.

    The first call is collective. `dist.new_group` would want the same calls on all ranks of the
    job, or, for some of them, each to be in equally many groups. So gloo meets in the store of the
    group itself, with its timeout, `ProcessGroup._get_backend(..).options._timeout`.

    Raises:
        RuntimeError: if a group has no store or no such backend.
    """
    if "cpu:" in dist.get_backend_config(group):
        return None
    if group not in _beside:  # each has sockets and threads
        try:
            options = group._get_backend(group._device_types[0]).options
            store = dist.PrefixStore("hosts", group.get_group_store())
            found = dist.ProcessGroupGloo(store, group.rank(), group.size(), options._timeout)
        except AttributeError as error:
            raise _missing("ProcessGroup._get_backend or get_group_store") from error
        _beside[group] = found
    return _beside[group]


def symmetric_memory() -> ModuleType:
    """Returns `torch.distributed._symmetric_memory`: private in name, documented all the same.

    Raises:
        RuntimeError: if torch has no such module.
    """
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise _missing("torch.distributed._symmetric_memory") from error
    return _symmetric_memory


class OperatorsOnly(Tensor):
    """A tensor whose operators PyTorch hands to `__torch_dispatch__`; other functions are as ever.

    `torch._C._disabled_torch_function_impl`, as PyTorch's notes on extending it have it.
    """

    __torch_function__ = getattr(  # without it, functions are slower
        torch._C, "_disabled_torch_function_impl", Tensor.__torch_function__
    )


def without_dispatch() -> AbstractContextManager:
    """Enters a context in which operators treat subclasses of tensors as tensors.

    Raises:
        RuntimeError: if there is no `torch._C._DisableTorchDispatch`.
    """
    try:
        return torch._C._DisableTorchDispatch()
    except AttributeError as error:
        raise _missing("torch._C._DisableTorchDispatch") from error


def in_backward() -> bool:
    """Returns whether autograd is running a backward in this thread."""
    return number_of_backward() != -1


def number_of_backward() -> int:
    """Returns the number of the backward that runs in this thread, -1 if none does.

    `torch._C._current_graph_task_id()`, which PyTorch's activation checkpointing asks too. A
    backward inside of another one, as reentrant checkpointing runs it, has a number of its own.

    Raises:
        RuntimeError: if autograd does not number its backwards.
    """
    try:
        return torch._C._current_graph_task_id()
    except AttributeError as error:
        raise _missing("torch._C._current_graph_task_id") from error


def without_torch_functions() -> AbstractContextManager:
    """Enters a context in which functions of PyTorch treat subclasses of tensors as tensors.

    `torch._C.DisableTorchFunctionSubclass`, which PyTorch's notes on extending it describe.

    Raises:
        RuntimeError: if there is no such context.
    """
    try:
        return torch._C.DisableTorchFunctionSubclass()
    except AttributeError as error:
        raise _missing("torch._C.DisableTorchFunctionSubclass") from error


def register_tree(cls: type, as_leaf: Callable[[Any, str], Any]) -> None:
    """Makes functions of nested arguments, as those of `torch.func`, call `as_leaf` of objects.

    `torch.utils._pytree.register_pytree_node`. Beside an object `as_leaf` gets the name of the
    module whose code calls such a function. What that makes of the leaf takes the object's place.

    Raises:
        RuntimeError: if there is no such function.
    """
    try:
        from torch.utils import _pytree as trees

        register = trees.register_pytree_node
    except (ImportError, AttributeError) as error:
        raise _missing("torch.utils._pytree.register_pytree_node") from error

    def flatten(x: Any) -> tuple[list[Any], None]:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals is vars(trees):
            frame = frame.f_back
        return [as_leaf(x, frame.f_globals.get("__name__", ""))], None

    register(cls, flatten, lambda leaves, _: next(iter(leaves)))


def refuse_writes(x: Tensor) -> None:
    """Makes whatever writes to the memory of a tensor raise a RuntimeError.

    `torch._C._set_throw_on_mutable_data_ptr`. Without it, writes are as ever.
    """
    if (refuse := getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)) is not None:
        refuse(x)


def written_by(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operator writes to, by its schema, lists flattened.

    Raises:
        RuntimeError: if torch does not tell: `OpOverload._schema`.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        raise _missing("OpOverload._schema")
    names = [x.name for x in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    found: list[Any] = []
    for x in schema.arguments:
        if x.alias_info is not None and x.alias_info.is_write and x.name in given:
            value = given[x.name]
            found += value if isinstance(value, list | tuple) else [value]
    return found


def in_transform() -> bool:
    """Returns whether a transform of `torch.func` is running, `grad` or `vmap` for example.

    `torch._C._functorch.peek_interpreter_stack`. Without it, False.
    """
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None
