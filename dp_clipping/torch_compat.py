"""Gives a name to each interface of PyTorch, and to one of Opacus, that has no public one.

Everything here is tested with `torch_versions.TESTED`; where these differ, the function says since
which. Another version warns, and where it lacks an interface Python's error names it. What only one
user needs is imported when it is called: `import dp_clipping` stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import profiler
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.optim.optimizer import _global_optimizer_pre_hooks as common_step_hooks
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from ddp_by_hand.torch_versions import warn_if_untested

__all__ = ["TorchDispatchMode", "WeakStorage", "common_step_hooks", "tree_map", "tree_map_only"]

ADDED = frozenset({
    "_private", "forward", "zero_grad", "refuse_wrapper", "__reduce_ex__", "_compiled_call_impl",
})  # fmt: skip
"""Attributes that private training adds to a network, and to that object only."""

OF_MACHINE = ("CUDA error", "ALLOC_FAILED", "can't allocate memory", "out of memory")
warn_if_untested()


PLAIN_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree and its structure, as PyTorch does, in few calls.

    Two structures are equal if their trees have the same containers and keys.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, None)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns the leaves of a tree; `is_leaf`: also leaves, where no tuple, list or dict is."""
    leaves: list[Any] = []
    _flatten(tree, leaves, is_leaf)
    return leaves


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
    left = iter(leaves)
    if structure is None:
        return next(left)
    if not isinstance(structure, tuple):
        return _pytree.tree_unflatten(list(islice(left, structure.num_leaves)), structure)
    container, inner = structure
    parts = [tree_unflatten(left, one) for one in inner]
    if isinstance(container, tuple):
        return dict(zip(container, parts, strict=True))
    return container(parts)


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns the number of in-place changes of a tensor."""

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
"""Returns the address of a GPU's current stream, fast. PyTorch for CPUs alone does not have it."""

set_to_zero: Callable[[list[Tensor]], None] = torch._foreach_zero_
add_to_each: Callable[[list[Tensor], float], None] = torch._foreach_add_
copy_each: Callable[[Any, Any], None] = torch._foreach_copy_
"""Sets numbers of tensors to zero, adds one to them, or copies them to tensors, by few kernels."""

fused_rms_norm: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._fused_rms_norm
"""Returns (y, rstd) of (x, shape, weight or None, eps), on CUDA."""

fused_rms_norm_backward: Callable[..., Any] = torch.ops.aten._fused_rms_norm_backward
"""Returns the gradients of x and weight, of (gy, x, shape, rstd, weight, which are wanted)."""

spin: Callable[[int], None] = torch.cuda._sleep  # keeps the stream busy for so many cycles

transforms_run: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether code runs under `torch.vmap` or another transform of `torch.func`."""

address_of_storage: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns the address of a storage, also of an empty one."""


def without_memory(kind: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """Returns a tensor of a subclass with shape and device of another, and no memory."""
    return Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


def allocated(device: torch.device) -> int:
    """Returns bytes in use. `torch.cuda.memory_allocated` takes longer: it sorts statistics."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


def to_one_buffer_(
    weights: list[Tensor], mode: str, input_size: int, hidden_size: int, proj_size: int,
    bidirectional: bool,
) -> None:  # fmt: skip
    """Moves weights of one recurrent layer to one piece of memory, in which cuDNN reads them.

    The arguments are those of `nn.RNNBase`.
    """
    number = torch.backends.cudnn.rnn.get_cudnn_mode(mode)
    stride = len(weights) // (2 if bidirectional else 1)
    sizes = input_size, number, hidden_size, proj_size, 1
    with torch.cuda.device_of(weights[0]):
        torch._cudnn_rnn_flatten_weight(weights, stride, *sizes, False, bidirectional)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""The number of the backward that runs in this thread, or -1; whether it calls a node."""


def apply_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns `function.apply` by one call, for where no transform of `torch.func` runs.

    `apply` itself looks at every argument, and at each number in it, in Python for their sake.
    Autograd then also calls `function.backward` itself, where it calls two functions of its own
    that call it.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def saves_by_hooks() -> bool:
    """Returns whether a context decides how autograd saves tensors, as checkpointing does."""
    of_autograd = torch._C._autograd
    is_free = of_autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return not is_free or of_autograd._top_saved_tensors_default_hooks(False) is not None


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
    if torch._C._len_torch_function_stack():
        return torch.autograd.grad(total, inputs, retain_graph=retain_graph, allow_unused=True)
    start = (torch.ones_like(total),)
    return torch.autograd.Variable._execution_engine.run_backward(
        (total,), start, retain_graph, False, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip


def gradients_in_modes(
    ys: Sequence[Tensor], inputs: Sequence[Tensor], starts: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns `torch.autograd.grad(ys, inputs, starts, allow_unused=True)`, within modes too.

    That function leaves each `TorchFunctionMode` outside of backward, where a checkpointed block is
    computed again: its operators would be others than in forward.
    """
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(ys), tuple(starts), False, False, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread now."""
    return current_backward() != -1


def is_passed_on(error: BaseException) -> bool:
    """Returns whether an error says nothing of the code that it is raised in.

    There is no memory left, the GPU has failed, or activation checkpointing has computed all that
    it needs.
    """
    stop = torch.utils.checkpoint._StopRecomputationError
    kinds = (torch.OutOfMemoryError, MemoryError, stop)
    return isinstance(error, kinds) or any(text in str(error) for text in OF_MACHINE)


def flush_ready_nodes() -> None:
    """Frees nodes, and their activations, that a failed backward left in this thread's queue.

    Its nodes hold activations until another backward runs in the thread: a trivial one does.
    """
    with torch.enable_grad():
        nothing = torch.zeros((), requires_grad=True, device="cpu")
        torch.autograd.grad(nothing + 0, nothing)


own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The dicts that hold a module's parameters, buffers and children, and names of buffers."""

BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: type[nn.Module] = nn.modules.instancenorm._InstanceNorm
DROPOUT: type[nn.Module] = nn.modules.dropout._DropoutNd
"""The base classes of layers of a kind."""

never_compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._disable_dynamo
"""Decorates a function that graphs break at; `torch.compiler.disable` imports torch._dynamo."""

is_profiling: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")
"""Returns whether `torch.profiler` records: `record_function` costs more than what it labels."""

hooks_so_far: Callable[[], int] = partial(getattr, torch.utils.hooks.RemovableHandle, "next_id")
"""Returns how many hooks were registered in this process: each has a larger number."""

gradient_hooks: Callable[[nn.Parameter], Any] = attrgetter("_backward_hooks")
accumulation_hooks: Callable[[nn.Parameter], Any] = attrgetter("_post_accumulate_grad_hooks")
step_hooks: Callable[[Any], dict] = attrgetter("_optimizer_step_pre_hooks")
"""Hooks of `Tensor.register_hook` and `register_post_accumulate_grad_hook`, by number, or None; and
of `Optimizer.register_step_pre_hook`. Those before steps of all optimizers: `common_step_hooks`."""


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


def hooks_of(module: nn.Module) -> list[Any]:
    """Returns the hooks around a module's forward and backward."""
    kinds = (
        module._forward_pre_hooks, module._forward_hooks,
        module._backward_pre_hooks, module._backward_hooks,
    )  # fmt: skip
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


def take_hooks_since(module: nn.Module, number: int) -> list[tuple[dict, int, Any]]:
    """Removes hooks around its forward since `hooks_so_far`; returns dict, key and hook of each."""
    dicts = (module._forward_pre_hooks, module._forward_hooks)
    found = [(d, key, hook) for d in dicts for key, hook in d.items() if key >= number]
    for hooks, key, _ in found:
        del hooks[key]
    return found


def set_gradient_hooks(parameter: nn.Parameter, hooks: dict[int, Any] | None) -> None:
    """Sets `gradient_hooks`; a handle still removes its hook from the dict that it is in."""
    parameter._backward_hooks = hooks


class Intercepted:
    """Redirects `module(..)` to `call(..)`, hooks and compiled code of the module included.

    It stands where `nn.Module.compile` puts compiled code, which a module calls in its place.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]):
        self.call, self.compiled = call, module._compiled_call_impl
        module._compiled_call_impl = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def call_intercepted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module as if its calls were not intercepted."""
    compiled = module._compiled_call_impl.compiled  # type: ignore[union-attr]
    return (module._call_impl if compiled is None else compiled)(*args, **kwargs)


def stop_intercepting(module: nn.Module) -> None:
    """Undoes `Intercepted`, if nothing has replaced it since."""
    if is_intercepted(module) and (found := module.__dict__.pop("_compiled_call_impl")).compiled:
        module._compiled_call_impl = found.compiled


def is_intercepted(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_compiled_call_impl"), Intercepted)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns whether `module.compile()` was called."""
    found = vars(module).get("_compiled_call_impl")
    return (found.compiled if isinstance(found, Intercepted) else found) is not None


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module was, by `module.compile()` or `torch.compile`."""
    return "_torchdynamo_orig_callable" in vars(module) or is_compiled_in_place(module)


def any_compiled(network: nn.Module) -> bool:
    """Returns whether any module of a network was, by `module.compile()` or `torch.compile`.

    It is asked in each step, and calls little for each module.
    """
    for module in every_module(network):
        own = module.__dict__
        if "_torchdynamo_orig_callable" in own:
            return True
        if "_compiled_call_impl" in own and is_compiled_in_place(module):
            return True
    return False


def any_size() -> AbstractContextManager:
    """Enters a context in which graphs compiled for a second size serve all others.

    Without these settings torch takes numbers and tensors that it finds at a module, as a step's
    slots, to be constants, and a Poisson batch is seldom as large as the last one. Layers count
    their calls, which checkpointed code may do by the last one.
    """
    return torch._dynamo.config.patch(
        force_nn_module_property_static_shapes=False, allow_unspec_int_on_nn_module=True,
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
    )  # fmt: skip


@contextmanager
def reusable_backwards() -> Iterator[None]:
    """Enters a context whose compiled graphs can run backward twice: they keep their inputs.

    The cache on disk does not know the first setting: it would hand out a backward that was
    compiled for one use, silently wrong in the second.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with functorch.patch(donated_buffer=False), inductor.patch(fx_graph_cache=False):
        yield


def loss_distribution(accountant: Any, *, epsilon_error: float, delta_error: float) -> Any | None:
    """Returns what Opacus's accountant `"prv"` makes of its history; None of other accountants.

    Its `compute_epsilon(delta, delta_error, epsilon_error)[2]` is an upper bound of ε at any δ.
    """
    if not hasattr(accountant, "_get_dprv"):
        return None
    return accountant._get_dprv(eps_error=epsilon_error, delta_error=delta_error)
