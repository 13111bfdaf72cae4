"""Gives a name to each interface of PyTorch, and to one of Opacus, that has no public one.

Everything here is tested with `torch_versions.TESTED`; where these differ, the function says since
which. Where another version lacks one of these interfaces, its function does without if the result
stays exact, else this file raises a RuntimeError that names it when it is imported (`NEEDED`), or
when its function is called. What only one user needs is imported when it is called: `import
dp_clipping` stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import profiler

from ddp_by_hand.torch_versions import RANGE, warn_if_untested

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

OF_MACHINE = ("CUDA error", "ALLOC_FAILED", "can't allocate memory", "out of memory")

warn_if_untested()


def _missing(api: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has no {api}, needed in private training: use torch {RANGE}"
    )


try:
    from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map, tree_map_only
except ImportError as error:
    raise _missing(
        "torch.utils._python_dispatch, torch.multiprocessing.reductions or torch.utils._pytree"
    ) from error

__all__ = ["TorchDispatchMode", "WeakStorage", "tree_map", "tree_map_only"]

NEEDED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("Module", nn.Module(), (
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
        "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
        "_compiled_call_impl",
    )),
    ("Tensor", Tensor, ("_version", "_make_wrapper_subclass")),
    ("RemovableHandle", torch.utils.hooks.RemovableHandle, ("next_id",)),
    ("torch.nn.modules.batchnorm", nn.modules.batchnorm, ("_BatchNorm",)),
    ("torch.nn.modules.instancenorm", nn.modules.instancenorm, ("_InstanceNorm",)),
    ("torch.nn.modules.dropout", nn.modules.dropout, ("_DropoutNd",)),
    ("torch", torch, ("_foreach_zero_",)),
    ("torch._C", torch._C, ("_current_graph_task_id", "_are_functorch_transforms_active")),
    ("aten", torch.ops.aten, ("_to_copy", "_fused_rms_norm", "_fused_rms_norm_backward")),
)  # fmt: skip
for owner, held, names in NEEDED:
    for name in names:
        if not hasattr(held, name):
            raise _missing(f"{owner}.{name}")

# ---- trees ---------------------------------------------------------------------------------------

PLAIN_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree and its structure, as PyTorch does, in few calls.

    Two structures are equal if their trees have the same containers and keys.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, None)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns the leaves of a tree.

    Args:
        is_leaf: also leaves, among what is no tuple, list or dict itself.
    """
    leaves: list[Any] = []
    _flatten(tree, leaves, is_leaf)
    return leaves


def address_of_storage(x: Tensor) -> int:
    """Returns the address of the storage of a tensor, which views share."""
    return x.untyped_storage()._cdata


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors among the leaves that PyTorch finds in the tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _flatten(node: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> Any:
    """Appends the leaves to a list; returns a container with its parts' structures, or None.

    The container of a dict is its keys, and None stands for a leaf. What is no tuple, list or dict
    itself is PyTorch's to open.
    """
    container: Any = type(node)
    if container in PLAIN_LEAVES:
        leaves.append(node)
        return None
    if container is dict:
        parts, container = node.values(), tuple(node)
    elif container is tuple or container is list:
        parts = node
    else:
        found, structure = _pytree.tree_flatten(node, is_leaf=is_leaf)
        leaves += found
        return structure
    structures: list[Any] = []
    for part in parts:
        if type(part) in PLAIN_LEAVES:
            leaves.append(part)
            structures.append(None)
        else:
            structures.append(_flatten(part, leaves, is_leaf))
    return container, tuple(structures)


def tree_unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """Returns the tree of this structure, as `tree_flatten` has returned it, with other leaves."""
    return _unflatten(iter(leaves), structure)


def _unflatten(leaves: Iterator[Any], structure: Any) -> Any:
    if structure is None:
        return next(leaves)
    if not isinstance(structure, tuple):
        return _pytree.tree_unflatten(list(islice(leaves, structure.num_leaves)), structure)
    container, inner = structure
    parts = [_unflatten(leaves, one) for one in inner]
    if isinstance(container, tuple):
        return dict(zip(container, parts, strict=True))
    return container(parts)


# ---- tensors and operators -----------------------------------------------------------------------


def without_memory(kind: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """Returns a tensor of a subclass with shape and device of another, and no memory."""
    return Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns the number of in-place changes of a tensor."""


def allocated(device: torch.device) -> int:
    """Returns bytes in use. `torch.cuda.memory_allocated` takes longer: it sorts statistics."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# Returns the address of a GPU's current stream, in a tenth of the time of PyTorch's object.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def set_to_zero(tensors: list[Tensor]) -> None:
    """Sets all numbers of some tensors to zero, by few kernels."""
    torch._foreach_zero_(tensors)


def apply_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns `function.apply` by one call, for where no transform of `torch.func` runs.

    `apply` itself looks at every argument, and at each number in it, in Python for their sake.
    Autograd then also calls `function.backward` itself, where it calls two functions of its own
    that call it. A torch without the class that it does this in keeps them.
    """
    if (node := getattr(function, "_backward_cls", None)) is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def shape_at(node: Any, number: int) -> tuple[int, ...] | None:
    """Returns the shape of an output of a node in an autograd graph; None: it is not known."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[number].shape) if number < len(metadata) else None


def gradients_at(
    total: Tensor, inputs: Sequence[Tensor], retain_graph: bool
) -> Sequence[Tensor | None]:
    """Returns `torch.autograd.grad(total, inputs, allow_unused=True)` by one call of its engine.

    The function itself looks at each of the inputs, of which a network has hundreds, in Python. It
    also leaves a user's `TorchFunctionMode` outside of backward, so where one runs it is called.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
    if engine is None or modes():
        return torch.autograd.grad(total, inputs, retain_graph=retain_graph, allow_unused=True)
    start = (torch.ones_like(total),)
    return engine.run_backward(
        (total,), start, retain_graph, False, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip


def fused_rms_norm(*args: Any) -> tuple[Tensor, Tensor]:
    """Returns (y, rstd) of (x, shape, weight or None, eps), on CUDA."""
    return torch.ops.aten._fused_rms_norm(*args)


def fused_rms_norm_backward(*args: Any) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight, of (gy, x, shape, rstd, weight, which are wanted)."""
    return torch.ops.aten._fused_rms_norm_backward(*args)


def is_dtype_cast(operator: Any) -> bool:
    """Returns whether a dispatched operator is `aten._to_copy`, which `x.to(dtype)` calls."""
    return operator.overloadpacket is torch.ops.aten._to_copy


def spin(cycles: int) -> None:
    """Keeps the current CUDA stream busy, `torch.cuda._sleep`; without it, does nothing.

    A benchmark that cannot hold its stream back repeats, and measures the host's launches too.
    """
    if (sleep := getattr(torch.cuda, "_sleep", None)) is not None:
        sleep(cycles)


def to_one_buffer_(
    weights: list[Tensor],
    mode: str,
    input_size: int,
    hidden_size: int,
    proj_size: int,
    bidirectional: bool,
) -> None:
    """Moves weights of one recurrent layer to one piece of memory, in which cuDNN reads them.

    Without `torch._cudnn_rnn_flatten_weight`, which changes the tensors in place, it does nothing:
    cuDNN copies weights that are apart, and warns.

    Args:
        mode: of `nn.RNNBase`, "LSTM" for example; the other arguments are that class's too.
    """
    if (flatten := getattr(torch, "_cudnn_rnn_flatten_weight", None)) is not None:
        number = torch.backends.cudnn.rnn.get_cudnn_mode(mode)
        stride = len(weights) // (2 if bidirectional else 1)
        shape = (input_size, number, hidden_size, proj_size, 1, False, bidirectional)
        with torch.cuda.device_of(weights[0]):
            flatten(weights, stride, *shape)


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread now."""
    return torch._C._current_graph_task_id() != -1


def next_node_number() -> int:
    """Returns a number that all later nodes of autograd's graph, but leaves', have at least."""
    with torch.enable_grad():
        return torch.zeros((), requires_grad=True).neg().grad_fn._sequence_nr()


def nodes_before(number: int, outputs: Iterable[Tensor]) -> list[Any]:
    """Returns the nodes with lower numbers that later nodes of the outputs' graph end at."""
    found, seen = [], set()
    left = [y.grad_fn for y in outputs]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < number:
            found.append(node)
        else:
            left += [one for one, _ in node.next_functions]
    return found


def is_passed_on(error: BaseException) -> bool:
    """Returns whether an error says nothing of the code that it is raised in.

    There is no memory left, the GPU has failed, or activation checkpointing has computed all that
    it needs.
    """
    stop = getattr(torch.utils.checkpoint, "_StopRecomputationError", MemoryError)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, stop)):
        return True
    return any(text in str(error) for text in OF_MACHINE)


def flush_ready_nodes() -> None:
    """Frees nodes, and their activations, that a failed backward left in this thread's queue.

    Its nodes hold activations until another backward runs in the thread: a trivial one does.
    """
    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True)
        torch.autograd.grad(nothing + 0, nothing)


# ---- modules -------------------------------------------------------------------------------------


own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The dicts that hold a module's parameters, buffers and children, and names of buffers."""


def parameters_and_children(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Returns `own_parameters` of all modules, then `own_modules`, without a loop in Python."""
    return [*map(own_parameters, modules), *map(own_modules, modules)]


def every_module(network: nn.Module) -> list[nn.Module]:
    """Returns `network.modules()` in no particular order, in a fraction of the time.

    PyTorch's own also makes every module's name, with one generator per level.
    """
    seen, found = {network}, [network]
    for module in found:  # which grows
        for child in own_modules(module).values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks before a module's forward."""
    return list(module._forward_pre_hooks.values())


def hooks_of(module: nn.Module) -> list[Any]:
    """Returns the hooks around a module's forward and backward."""
    kinds = (
        module._forward_pre_hooks, module._forward_hooks,
        module._backward_pre_hooks, module._backward_hooks,
    )  # fmt: skip
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


hooks_so_far: Callable[[], int] = partial(getattr, torch.utils.hooks.RemovableHandle, "next_id")
"""Returns how many hooks were registered in this process: each has a larger number."""


def take_hooks_since(module: nn.Module, number: int) -> list[tuple[dict, int, Any]]:
    """Removes the hooks around its forward that were registered after `hooks_so_far`.

    Returns:
        For each hook its dict, its number and itself, to be put back there.
    """
    dicts = (module._forward_pre_hooks, module._forward_hooks)
    found = [(d, key, hook) for d in dicts for key, hook in d.items() if key >= number]
    for hooks, key, _ in found:
        del hooks[key]
    return found


GRADIENT_HOOKS: Callable[[nn.Parameter], Any] = (
    attrgetter("_backward_hooks") if hasattr(Tensor, "_backward_hooks") else lambda _: None
)
"""Returns the hooks of `Tensor.register_hook` of a parameter; None if torch does not tell."""


def with_gradient_hooks(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns those on which `Tensor.register_hook` was called."""
    return list(filter(GRADIENT_HOOKS, parameters))


def take_gradient_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """Takes the hooks of `Tensor.register_hook` off a parameter, and returns them.

    A handle that is removed later still removes its hook from them.
    """
    hooks: Any = parameter._backward_hooks
    parameter._backward_hooks = None
    return hooks


def put_gradient_hooks(parameter: nn.Parameter, hooks: dict[int, Any]) -> None:
    """Puts hooks back that `take_gradient_hooks` has returned, in front of later ones."""
    hooks.update(parameter._backward_hooks or {})
    parameter._backward_hooks = hooks


def accumulation_hooks(parameters: Iterable[nn.Parameter]) -> list[dict[int, Any] | None]:
    """Returns the hooks of `Tensor.register_post_accumulate_grad_hook`, by number, of each.

    None: it has none, or torch does not tell.
    """
    if not hasattr(Tensor, "_post_accumulate_grad_hooks"):
        return []
    return list(map(attrgetter("_post_accumulate_grad_hooks"), parameters))


def pruned_name(hook: Any) -> str:
    """Returns the name of the parameter that a pruning hook computes, "weight" if unknown."""
    return getattr(hook, "_tensor_name", "weight")


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: type[nn.Module] = nn.modules.instancenorm._InstanceNorm
DROPOUT: type[nn.Module] = nn.modules.dropout._DropoutNd
"""The base classes of layers of a kind."""


def active_wrapper() -> nn.Module | None:
    """Returns the `DistributedDataParallel` whose forward is running; None if torch has no such.

    A flag that torch.compile reads too. DDP with the Python reducer sets none.
    """
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def composable_replicas() -> tuple[type, ...]:
    """Returns the class that `torch.distributed._composable.replicate` adds to a module's own.

    PyTorch's DDP as hooks on the module; without that module, (). What its `replicate_with_fsdp`
    makes is of another class: FSDP2 exchanges the sums there.
    """
    try:
        from torch.distributed._composable.replicate import DDP
    except ImportError:
        return ()
    return (DDP,)


# ---- vmap ----------------------------------------------------------------------------------------


transforms_run: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether code runs under `torch.vmap` or another transform of `torch.func`."""


# ---- compilation and profiling -------------------------------------------------------------------


ADDED = frozenset({
    "_private", "forward", "zero_grad", "refuse_wrapper", "__reduce_ex__", "_compiled_call_impl",
})  # fmt: skip
"""Attributes that private training adds to a network, and to that object only."""


class Intercepted:
    """Stands where `nn.Module.compile` puts compiled code, which a module calls in its place."""

    def __init__(self, call: Callable[..., Any], compiled: Callable[..., Any] | None):
        self.call, self.compiled = call, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def intercept_calls(module: nn.Module, call: Callable[..., Any]) -> None:
    """Redirects `module(..)` to `call(..)`, hooks and compiled code of the module included."""
    module._compiled_call_impl = Intercepted(call, module._compiled_call_impl)  # type: ignore[assignment]


def call_intercepted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module as if its calls were not intercepted."""
    compiled = module._compiled_call_impl.compiled  # type: ignore[union-attr]
    return (module._call_impl if compiled is None else compiled)(*args, **kwargs)


def stop_intercepting(module: nn.Module) -> None:
    """Undoes `intercept_calls`, if nothing has replaced it since."""
    if isinstance(found := vars(module).get("_compiled_call_impl"), Intercepted):
        if found.compiled is None:
            del module.__dict__["_compiled_call_impl"]
        else:
            module._compiled_call_impl = found.compiled


def is_intercepted(module: nn.Module) -> bool:
    """Returns whether `intercept_calls` was called."""
    return isinstance(vars(module).get("_compiled_call_impl"), Intercepted)


def _compiled_call(own: dict[str, Any]) -> Any:
    """Returns the compiled call that `compile()` stores in a module; None: it was not called."""
    found = own.get("_compiled_call_impl")
    return found.compiled if isinstance(found, Intercepted) else found


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns whether `module.compile()` was called."""
    return _compiled_call(vars(module)) is not None


def any_compiled(network: nn.Module) -> bool:
    """Returns whether any module of a network was, by `module.compile()` or `torch.compile`.

    It is asked in each step, and calls little for each module.
    """
    seen, found = {network, None}, [network]
    for module in found:  # which grows
        own = module.__dict__
        if "_torchdynamo_orig_callable" in own:
            return True
        if "_compiled_call_impl" in own and _compiled_call(own) is not None:
            return True
        if children := own["_modules"]:
            new = set(children.values()) - seen
            seen |= new
            found += new
    return False


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that graphs break at, `torch._disable_dynamo`.

    Without it `torch.compiler.disable`, which imports torch._dynamo, a second, at once.
    """
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


def any_size() -> AbstractContextManager:
    """Enters a context in which graphs compiled for a second size serve all others.

    Without these settings torch takes numbers and tensors that it finds at a module, as a step's
    slots, to be constants, and a Poisson batch is seldom as large as the last one. A torch that
    lacks them compiles more often.
    """
    config = torch._dynamo.config
    wanted = {
        "force_nn_module_property_static_shapes": False, "allow_unspec_int_on_nn_module": True,
    }  # fmt: skip
    known = {name: value for name, value in wanted.items() if hasattr(config, name)}
    return config.patch(known) if known else nullcontext()


@contextmanager
def reusable_backwards() -> Iterator[None]:
    """Enters a context whose compiled graphs can run backward twice: they keep their inputs.

    The cache on disk does not know the first setting: it would hand out a backward that was
    compiled for one use, silently wrong in the second.

    Raises:
        RuntimeError: if torch lacks one of the settings.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    for config, name in ((functorch, "donated_buffer"), (inductor, "fx_graph_cache")):
        if not hasattr(config, name):
            raise _missing(f"{config.__name__}.{name}")
    with functorch.patch(donated_buffer=False), inductor.patch(fx_graph_cache=False):
        yield


is_profiling: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", True)
"""Returns whether `torch.profiler` records now; True if torch does not say.

It spares the host `record_function`, which costs more than the launches it labels.
"""


# ---- optimizers ----------------------------------------------------------------------------------


def is_hook_registry(name: str) -> bool:
    """Returns whether an attribute of an optimizer holds hooks of its steps or state dicts."""
    return name.startswith("_optimizer_")


# ---- process groups and DTensor ------------------------------------------------------------------


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

    Raises:
        RuntimeError: if process groups have no such method.
    """
    run = getattr(group, "reduce_scatter_single_coalesced", None)
    run = run or getattr(group, "reduce_scatter_tensor_coalesced", None)
    if run is None:
        raise _missing("ProcessGroup.reduce_scatter_tensor_coalesced")
    options = dist.ReduceScatterOptions()
    options.asyncOp = True
    return run(outputs, inputs, options)


def all_reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Starts the sums of all ranks' tensors, in place: contiguous, one dtype.

    Raises:
        RuntimeError: if process groups have no such method.
    """
    if (run := getattr(group, "allreduce_coalesced", None)) is None:
        raise _missing("ProcessGroup.allreduce_coalesced")
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    return run(tensors, options)


def layout_of(x: DTensor) -> Any:
    """Returns a DTensor's `_spec`, for `with_layout`; None if it has none."""
    return getattr(x, "_spec", None)


def with_layout(part: Tensor, layout: Any) -> DTensor:
    """Returns a DTensor of this rank's part and the layout of another DTensor.

    The constructor has no public name; `DTensor.from_local` takes as long as several launches.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(part, layout, requires_grad=False)


def strided_shard(placement: Any) -> tuple[int, int] | None:
    """Returns dimension and split factor of a `_StridedShard`; None for another placement.

    Raises:
        RuntimeError: if a strided shard has no such attributes.
    """
    if type(placement).__name__ != "_StridedShard":
        return None
    if not (hasattr(placement, "dim") and hasattr(placement, "split_factor")):
        raise RuntimeError(
            f"torch {torch.__version__} describes {placement!r} otherwise than {RANGE} do: "
            "use one of those"
        )
    return placement.dim, int(placement.split_factor)


# ---- FSDP1 ---------------------------------------------------------------------------------------

WRAPPED = "_fsdp_wrapped_module"
USE_FSDP2 = "shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead"


def plain_name(name: str) -> str:
    """Returns the name of a module or a parameter before FSDP1 wrapped modules around it."""
    return name.replace(f"{WRAPPED}.", "").removesuffix(WRAPPED).removesuffix(".")


FSDP1_FUNCTIONS = {
    "_reshard": ["state", "handle", "free_unsharded_flat_param"],
    "_post_backward_final_callback": ["state", "module"],
}
FSDP1_HANDLE = (
    "_needs_pre_backward_unshard", "flat_param", "needs_unshard", "reshard",
    "uses_sharded_strategy",
)  # fmt: skip


def _no_fsdp1(api: str) -> RuntimeError:
    return RuntimeError(
        f"FSDP1 of torch {torch.__version__} has no {api}, needed in private training: "
        f"{USE_FSDP2}, or use torch {RANGE}"
    )


def check_fsdp1(units: Iterable[FullyShardedDataParallel]) -> None:
    """Looks for what private training uses of FSDP1 beside its public names.

    Raises:
        RuntimeError: that names what is not there, or takes other arguments.
    """
    from torch.distributed.fsdp import _runtime_utils as runtime

    for name, parameters in FSDP1_FUNCTIONS.items():
        found = getattr(runtime, name, None)
        if found is None or list(signature(found).parameters) != parameters:
            raise _no_fsdp1(f"_runtime_utils.{name}({', '.join(parameters)})")
    for unit in units:
        for name in ("_handle", WRAPPED):
            if not hasattr(unit, name):
                raise _no_fsdp1(f"FullyShardedDataParallel.{name}")
        if (handle := fsdp1_handle(unit)) is None:
            continue
        for name in FSDP1_HANDLE:
            if not hasattr(handle, name):
                raise _no_fsdp1(f"FlatParamHandle.{name}")
        if not isinstance(getattr(handle.flat_param, "_tensors", None), list):
            raise _no_fsdp1("list FlatParameter._tensors")


def fsdp1_handle(unit: FullyShardedDataParallel) -> Any:
    """Returns FSDP1's state of a unit's flat parameter; None for a unit without parameters."""
    return unit._handle


def fsdp1_stand_ins(handle: Any) -> list[Any]:
    """Returns the tensors that stand for a flat parameter's members while it is gathered."""
    return handle.flat_param._tensors


def fsdp1_gather_in_backward(handle: Any) -> None:
    """Makes the next backward gather, also if it is the second one of a forward."""
    handle._needs_pre_backward_unshard = True


def fsdp1_free(unit: FullyShardedDataParallel, handle: Any) -> None:
    """Frees the gathered parameters of a unit, as FSDP1 does at the end of a backward.

    Raises:
        RuntimeError: if they are still there, and the next forward would compute with them.
    """
    from torch.distributed.fsdp._runtime_utils import _reshard

    _reshard(unit, handle, free_unsharded_flat_param=True)
    if not handle.needs_unshard():
        raise _no_fsdp1("_runtime_utils._reshard that frees gathered parameters")


def fsdp1_end_backward(root: FullyShardedDataParallel) -> None:
    """Runs FSDP1's callback for the end of a whole backward."""
    from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback

    _post_backward_final_callback(root, root)


def loss_distribution(accountant: Any, *, epsilon_error: float, delta_error: float) -> Any | None:
    """Returns what Opacus's accountant `"prv"` makes of its history; None of other accountants.

    Its `compute_epsilon(delta, delta_error, epsilon_error)[2]` is an upper bound of ε at any δ.
    """
    if not hasattr(accountant, "_get_dprv"):
        return None
    return accountant._get_dprv(eps_error=epsilon_error, delta_error=delta_error)
