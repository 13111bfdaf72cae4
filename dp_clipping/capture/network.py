"""A captured network as steps and searches know it, which import no layers.

Capturing is `capture.Capture`'s. Here are the records of its parameters, the private step that its
layers' calls belong to, and plain forwards that are only tried.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture.calls import with_signature_of
from dp_clipping.capture.samples.bags import refuse_offsets
from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.dtensor import owner_of, plain_name
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.layers.handle import LayerState, plain_forward
from dp_clipping.layers.recorder import Trainable
from dp_clipping.torch_compat import (
    accumulation_hooks,
    any_compiled,
    any_size,
    every_module,
    flush_ready_nodes,
    gradients_in_modes,
    reusable_backwards,
    tensors_in,
)
from dp_clipping.trials.draws import without_dropout
from dp_clipping.trials.randomness import same_randomness

Arguments = tuple[tuple, dict]  # of a forward
Watch = Callable[..., Any]
"""`watch(module, run, *args, **kwargs)` -> what a captured module returns; `run` is its code."""


class Attached:
    """A context in which layers' calls belong to a private step (None: to none)."""

    def __init__(self, capture: "CapturedNetwork", private_step: Any):
        self._capture, self._private_step = capture, private_step

    def __enter__(self) -> None:
        capture, private_step = self._capture, self._private_step
        self._outer, capture.attached_step = capture.attached_step, private_step
        self._before = {h: (h.private_step, h.slots) for h in capture.handles}
        made = {} if private_step is None else private_step.slots
        for handle in capture.handles:
            handle.private_step = private_step
            handle.slots, handle.calls = made.get(handle.name, {}), 0

    def __exit__(self, *_: object) -> None:
        outer = self._capture.attached_step = self._outer
        for handle in self._capture.handles:  # some may be new
            handle.private_step, handle.slots = self._before.get(handle, (outer, {}))


@contextmanager
def _with_compiled_code(attached: Attached, may_run_twice: bool) -> Iterator[None]:
    with attached, any_size(), reusable_backwards() if may_run_twice else nullcontext():
        yield


class CapturedNetwork(ABC):
    """A network whose layers deliver per-sample gradients to private steps.

    Each forward of a private step runs inside `attached`, where layers deliver to that step. The
    search for samples runs plain forwards, as `plain_run` does. The attributes do not change
    afterwards, but `handles`.

    Attributes:
        network: the bare network, without a wrapper.
        handles: the handles of every captured module.
        parameters: trainable ones in order of registration, tied ones once.
        names: parameter -> its full name.
        trained: a record of each of `parameters`, for steps; `record` has them by parameter.
        groups: parameter -> clipping group; `group_names` has one line per group.
        members: the records of each clipping group.
        trigger: one parameter's trigger; see `Trainable`.
        sharding: how the network is spread over ranks; None: it is not.
        state: a `trials.objects.State` of the network, which `guard.guard` sets, or None.
        attached_step: the private step that layers' calls belong to now, or None.
        copied: parameters whose copies a module computes with -> the module, and its name there.
    """

    def __init__(self, network: nn.Module, clipping: str, sharding: Sharding | None):
        self.network, self.sharding = network, sharding
        self.attached_step: Any = None
        self.handles: list[LayerState] = []
        self.copied: dict[Trainable, tuple[nn.Module, str]] = {}
        self.state: Any = None
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.names = {p: plain_name(n) for n, p in reversed(list(network.named_parameters()))}
        self.groups, self.group_names = self._make_groups(clipping)
        self.trained = self._make_records()
        self.record = {one.parameter: one for one in self.trained}
        self.members: list[list[Trainable]] = [[] for _ in self.group_names]
        for one in self.trained:
            self.members[one.group].append(one)
        self.trigger = self.trained[0].trigger
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._hooks = []
        for module, names in () if sharding is None else sharding.gathering:
            owners = {p: owner_of(module, name) for p, name in names.items()}
            note = partial(self._note_leaves, owners)
            self._hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))

    def hooks_after_accumulation(self, is_wrapped: bool) -> list[dict]:
        """Returns those of each parameter; [] with a data-parallel wrapper, which may have some."""
        if is_wrapped:
            return []
        return [hooks or {} for hooks in map(accumulation_hooks, self.parameters)]

    @abstractmethod
    def make_whole(self, handles: Collection[LayerState]) -> None:
        """Runs these modules under vmap, with their children; where samples are is forgotten.

        A gradient can be differentiated again there. All layers get a new state.
        """

    @abstractmethod
    def widen(self, modules: Collection[nn.Module], layers: Collection[str]) -> bool:
        """Lets these modules compute with copies of the parameters of layers that they call.

        A module that does so already runs under vmap with its children. Returns False, and does
        nothing, if they all do, or if ranks share the network's parameters.
        """

    @abstractmethod
    def restart(self) -> None:
        """Captures layers as at first, whatever runs under vmap since."""

    @abstractmethod
    def let_read(self, weights: dict[nn.Module, list[Parameter]]) -> None:
        """Lets these modules compute with copies of the weights of layers that their code reads."""

    def _make_records(self) -> list[Trainable]:
        """Makes the records by which steps know the trainable parameters."""
        parts = {} if self.sharding is None else self.sharding.parts
        found = []
        for number, p in enumerate(self.parameters):
            shape = parts[p].shape if p in parts else p.shape
            group, split = self.groups[p], p in parts and parts[p].split
            trigger = torch.zeros((), device=p.device, requires_grad=True)
            rest = accumulation_dtype(p.dtype), trigger
            found.append(Trainable(p, number, self.names[p], shape, group, (group, split), *rest))
        return found

    def _make_groups(self, clipping: str) -> tuple[dict[Parameter, int], list[str]]:
        """Makes one group of all parameters, or one per module; a tied weight is in its first."""
        if clipping == "flat":
            return dict.fromkeys(self.parameters, 0), ["all parameters"]
        owners = {p: self.names[p].rpartition(".")[0] for p in self.parameters}
        names = list(dict.fromkeys(owners.values()))
        return {p: names.index(owner) for p, owner in owners.items()}, names

    def _note_leaves(
        self,
        owners: dict[Parameter, tuple[nn.Module, str]],
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> None:
        """Records the tensors that stand for sharded parameters now.

        Before the forward of what gathers them, since nothing of theirs may be called at all.
        """
        if self.attached_step is not None:
            leaves = {p: getattr(owner, name) for p, (owner, name) in owners.items()}
            self.attached_step.leaves.update(leaves)
            self.sharding.entered(module, lambda: tensors_in((args, kwargs)))

    @contextmanager
    def new_triggers(self) -> Iterator[None]:
        """Enters a context with new triggers: leaves that no earlier step has used.

        Autograd remembers on which stream a leaf was first used, as long as a graph with it is
        alive, and makes that stream wait. So a step that is captured on another stream needs
        leaves of its own.
        """
        before = [one.trigger for one in self.trained]
        for one in self.trained:
            one.trigger = torch.zeros_like(one.trigger, requires_grad=True)
        try:
            yield
        finally:
            for one, trigger in zip(self.trained, before, strict=True):
                one.trigger = trigger

    def attached(self, private_step: Any) -> AbstractContextManager[None]:
        """Returns a context in which layers' calls belong to the private step (None: to none)."""
        attached = Attached(self, private_step)
        if private_step is None or not private_step.is_compiled:
            return attached
        return _with_compiled_code(attached, private_step.policy.may_run_twice)

    def shared_layers(self) -> list[str]:
        """Returns the layer of each input or output that is known to be expanded to the batch."""
        return [
            handle.name
            for handle in self.handles
            for layouts in (*handle.layouts.values(), *handle.output_layouts.values())
            for layout in layouts
            if layout.kind == "shared"
        ]

    @property
    def apart(self) -> list[LayerState]:
        """Returns the vectorized modules whose child layers are captured themselves."""
        return [handle for handle in self.handles if handle.children_apart]

    @property
    def inner(self) -> list[LayerState]:
        """Returns the subclasses of layers in which only the layer's own call is captured."""
        return [handle for handle in self.handles if handle.inner is not None]

    @property
    def is_compiled(self) -> bool:
        """Returns whether any part of the network is."""
        return any_compiled(self.network)

    def slot_value(self, parameter: Trainable) -> Tensor:
        """Returns the tensor that a slot expands: the parameter if a module uses it, else a zero.

        Its dtype is that of the G it receives: float16's largest number is too small for a sum
        over tokens, so there G is float32.
        """
        if parameter in self.copied:
            return getattr(*self.copied[parameter]).detach()
        dtype, device = parameter.parameter.dtype, parameter.trigger.device.type
        if len(parameter.shape) < 2:
            dtype = accumulation_dtype(dtype)
        elif torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if dtype == torch.float16:
            dtype = accumulation_dtype(dtype)
        return self.zero(dtype)

    def zero(self, dtype: torch.dtype) -> Tensor:
        """Returns one number, kept."""
        if dtype not in self._zeros:
            self._zeros[dtype] = torch.zeros((), dtype=dtype, device=self.trigger.device)
        return self._zeros[dtype]


@dataclass
class LayerCall:
    """Inputs and outputs of one call of a layer; meta tensors where their shapes suffice.

    `product_dtype` is the dtype in which a matrix product of the first input would be computed;
    `has_moved`: some inputs are rows that were picked or sorted by values (`trials.routing`).
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    product_dtype: torch.dtype | None
    has_moved: bool = False


def fixed_like(y: Tensor) -> Tensor:
    """Returns a gradient of an output: each element has its own, which is always the same."""
    return torch.arange(1.0, y.numel() + 1, device="cpu").sin().view(y.shape).to(y)


def gradients_of(outputs: list[Tensor], parameters: list[Parameter]) -> tuple[Tensor | None, ...]:
    """Returns gradients of a plain run's outputs; () if it has none, as a step will say."""
    ys = [y for y in outputs if y.requires_grad and y.is_floating_point()]
    try:
        return gradients_in_modes(ys, parameters, list(map(fixed_like, ys))) if ys else ()
    except Exception:
        flush_ready_nodes()
        return ()


@contextmanager
def plain_run(
    capture: CapturedNetwork, args: tuple, kwargs: dict, watch: Watch | None = None,
    has_graph: bool | None = None, has_dropout: bool = False, keeps_state: bool = False,
) -> Iterator[Any]:  # fmt: skip
    """Runs a forward that is only tried, without compiled code, and yields its outputs.

    At the end random generators, the network's own too, the network, and objects in the arguments
    are as they were. On ranks that share the network's parameters it is not put back, as FSDP keeps
    state of its own there.

    Args:
        watch: takes calls of captured modules.
        has_graph: a graph is recorded; None: unless the network is sharded, as FSDP would wait for
            its backward.
        has_dropout: dropout is left as it is, not turned off.
        keeps_state: what the forward leaves in the network stays there.
    """
    network, state, is_sharded = capture.network, capture.state, capture.sharding is not None
    modules = every_module(network)
    with ExitStack() as stack:
        stack.enter_context(capture.attached(None))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(same_randomness(modules, capture.trigger.device))
        for module in modules:
            if is_sharded and isinstance(module, nn.EmbeddingBag):
                hook = module.register_forward_pre_hook(refuse_offsets, with_kwargs=True)
                stack.callback(hook.remove)
        if watch is not None:
            stack.enter_context(_watched(network, modules, watch))
        if not has_dropout:
            stack.enter_context(without_dropout(network))
        has_graph = not is_sharded if has_graph is None else has_graph
        stack.enter_context(torch.set_grad_enabled(has_graph))
        if state is not None:
            only_given = keeps_state or is_sharded
            stack.enter_context(state.rewound(args, kwargs, only_given=only_given))
        yield network(*args, **kwargs)


@contextmanager
def _watched(network: nn.Module, modules: list[nn.Module], watch: Watch) -> Iterator[None]:
    """Enters a context in which `watch` takes calls of captured modules or their inner layers."""
    every = [(vars(m)["_private"], m, vars(m)) for m in modules if "_private" in vars(m)]
    before = [own["forward"] for _, _, own in every]
    for handle, module, own in every:
        handle.watch = watch
        if handle.inner is None:
            call = partial(watch, module, partial(plain_forward, module))
            own["forward"] = with_signature_of(call, module) if module is network else call
    try:
        yield
    finally:
        for (handle, _, own), forward in zip(every, before, strict=True):
            handle.watch = None
            if own.get("_private") is handle:  # it may have been captured otherwise meanwhile
                own["forward"] = forward
