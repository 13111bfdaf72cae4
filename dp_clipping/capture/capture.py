"""Captures a network: its layers deliver per-sample gradients in place of their sum.

Each layer that owns trainable parameters gets a forward that runs its arithmetic as one autograd
function, with detached parameters. In backward this function calls a `PrivateStep`. Outside of a
private step (evaluation, inference, the user's own calls) the layers compute as before.

Layers have no hooks, so `torch.compile`, non-reentrant activation checkpointing and autocast see
plain autograd functions.
"""

import types
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture.calls import (
    let_copies_be,
    let_copies_be_plain,
    with_signature_of,
    without_repr,
)
from dp_clipping.capture.layer_kinds import ALL, Computation, inner_layer, kind_of
from dp_clipping.capture.ownership import (
    CONTAINERS,
    can_be_apart,
    owned,
    trainable_names,
)
from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.dtensor import is_fsdp1, owner_of
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.layers import inner_call
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.inner_call import Inner
from dp_clipping.layers.recorder import Recorder, Trainable
from dp_clipping.layers.registered.registry import refuse_where_unfit
from dp_clipping.torch_compat import (
    any_compiled,
    any_size,
    every_module,
    own_parameters,
    plain_name,
    reusable_backwards,
    stop_intercepting,
    tensors_in,
)
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.validation import refuse_offsets


class Capture:
    """The layers of one network, captured.

    `PrivateModel` makes it, and `remove` restores the network's own forwards. Each forward of a
    private step runs inside `attached`, where layers deliver to that step. The search for samples
    runs plain forwards inside `looked_at`. The attributes do not change afterwards.

    Raises:
        ValueError: the network is in evaluation.

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
        state: a `checks.state.State` of the network, which `guard.guard` sets, or None.
        arithmetic: what captured layers compute with; a step raises if it was changed.
    """

    def __init__(
        self, network: nn.Module, clipping: str = "flat", sharding: Sharding | None = None
    ):
        if not network.training:
            raise ValueError(
                "the network is in evaluation, as from_pretrained() and eval() leave it: call "
                "network.train() before make_private (single modules may stay in evaluation)"
            )
        self.network, self.sharding = network, sharding
        self._whole: set[nn.Module] = set()
        self._unfit: set[nn.Module] = set()  # subclasses of layers that compute otherwise
        # Modules that compute with copies of weights of layers in them, too.
        self._widened: dict[nn.Module, list[Parameter]] = {}
        self._session: Recorder | None = None
        self._originals = {  # FSDP puts others in their place
            (module, name): parameter
            for module in network.modules()
            for name, parameter in own_parameters(module).items()
        }
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
        self._install()
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._hooks = []
        for module, names in () if sharding is None else sharding.gathering:
            owners = {p: owner_of(module, name) for p, name in names.items()}
            note = partial(self._note_leaves, owners)
            self._hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))

    # ---- which layers ---------------------------------------------------------------------------

    def _install(self) -> None:
        """Replaces the forwards of all modules that own trainable parameters.

        A module that owns bare parameters runs on the whole batch, and the child layers that it
        calls are captured like any others; or it takes its children under vmap.
        """
        whole_samples = self.sharding is None or self.sharding.tensor_group is None
        is_plain = whole_samples and not self.is_compiled
        self.handles: list[LayerState] = []
        self._copied: dict[Trainable, tuple[nn.Module, str]] = {}
        covered: set[nn.Module] = set()  # by a module around them
        for name, module in self.network.named_modules():
            is_widened = module in self._widened
            owns = any(p.requires_grad for p in owned(module))
            if module in covered or not (is_widened or owns):
                continue
            if isinstance(module, CONTAINERS) and not is_widened:
                continue
            kind = "vectorized" if is_widened else kind_of(module)
            if kind == "attention" and module in self._whole:
                kind = "vectorized"
            if kind == "registered":
                refuse_where_unfit(plain_name(name), module, self.sharding)
            inner = None
            if kind == "vectorized" and is_plain and not is_widened and module not in self._unfit:
                inner = inner_layer(module)
                kind = kind if inner is None else inner.kind
            under_vmap = kind == "vectorized" and (module in self._whole or not is_plain)
            may_be_apart = kind == "vectorized" and not under_vmap
            is_apart = may_be_apart and can_be_apart(module, self.sharding is not None)
            if is_apart:
                covered.update(self._taken_by(module))
            elif kind in ("vectorized", "attention", "recurrent"):
                self._refuse_gathered(module)
                covered.update(module.modules())
            name = plain_name(name) + (" (FSDP)" if is_fsdp1(module) else "")
            self._replace_forward(name, kind, module, is_apart, under_vmap, inner)
        self.arithmetic = Computation(
            (plain_name(name), module)
            for name, module in self.network.named_modules()
            if "_private" in vars(module)
        )

    def _taken_by(self, module: nn.Module) -> list[nn.Module]:
        """Returns the layers in a module all of whose parameters are captured with it."""
        taken = set(self._widened.get(module, ()))
        trained = {m: {p for p in owned(m) if p.requires_grad} for m in module.modules()}
        return [m for m, own in trained.items() if m is not module and own and own <= taken]

    def _replace_forward(
        self, name: str, kind: str, module: nn.Module, is_apart: bool, under_vmap: bool,
        inner: Inner | None,
    ) -> None:  # fmt: skip
        takes_all = kind in ("vectorized", "attention") and not is_apart
        read = self._widened.get(module, ())
        owns = is_apart or kind == "registered"
        names = trainable_names(module, takes_all, owns, read, under_vmap)
        parameters = {n: self.record[self._originals[owner_of(module, n)]] for n in names}
        handle = LayerState(name, kind, module, names, parameters)
        handle.children_apart = is_apart
        if under_vmap:
            handle.operations = None
        run = ALL[kind].forward
        handle.learns_outputs, handle.is_linear = ALL[kind].learns_outputs, ALL[kind].is_linear
        if inner is not None:
            run = inner_call.arithmetic_of(run, inner)
            handle.inner, handle.inner_forward, run = inner, run, inner_call.forward
        bound: Any = types.MethodType(run, module)
        if isinstance(module, nn.EmbeddingBag):
            bound = without_repr(bound)
        if module is self.network:
            bound = with_signature_of(bound, module)
        module._private, module.forward = handle, bound
        let_copies_be_plain(module)
        self.handles.append(handle)
        if kind == "vectorized":
            for own, parameter in handle.parameters().items():
                self._copied[parameter] = owner_of(module, own)

    def _uninstall(self) -> None:
        for module in self.network.modules():
            if "_private" in vars(module):
                own = module._private.own_forward
                del module._private, module.forward
                if module is not self.network:
                    stop_intercepting(module)
                let_copies_be(module)
                if own is not None:
                    module.forward = own

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

    def make_whole(self, handles: Collection[LayerState]) -> None:
        """Runs these modules under vmap, with their children; where samples are is forgotten.

        All layers get a new state.
        """
        modules = [m for m in self.network.modules() if vars(m).get("_private") in handles]
        for module in modules:
            if vars(module)["_private"].inner is None:
                self._refuse_gathered(module)
        self._unfit.update(m for m in modules if vars(m)["_private"].inner is not None)
        self._whole.update(m for m in modules if vars(m)["_private"].inner is None)
        self._uninstall()
        self._install()
        for handle in self.handles:
            handle.private_step = self._session

    def widen(self, modules: Collection[nn.Module], layers: Collection[str]) -> bool:
        """Lets these modules compute with copies of the parameters of layers that they call.

        A module that does so already runs under vmap with its children. Returns False, and does
        nothing, if they all do, or if ranks share the network's parameters.
        """
        mine = [handle for handle in self.handles if handle.name in layers]
        weights = [one.parameter for handle in mine for one in handle.parameters().values()]
        is_known = all(module in self._whole for module in modules)
        if self.sharding is not None or not modules or is_known:
            return False
        for module in modules:
            before = self._widened.setdefault(module, [])
            inside = {id(p) for p in module.parameters()} - set(map(id, before))
            found = [p for p in dict.fromkeys(weights) if id(p) in inside]
            before += found
            if not found:
                self._whole.add(module)
        self.make_whole(())
        return True

    def let_read(self, weights: dict[nn.Module, list[Parameter]]) -> None:
        """Lets these modules compute with copies of the weights of layers that their code reads."""
        if weights:
            self._widened |= weights
            self.make_whole(())

    def let_differentiate(self, handles: Collection[LayerState]) -> None:
        """Runs these modules under vmap, where a gradient can be differentiated again."""
        modules = [m for m in self.network.modules() if vars(m).get("_private") in handles]
        self._widened |= {module: [] for module in modules if module not in self._widened}
        self._whole.update(modules)
        self.make_whole(())

    def _refuse_gathered(self, module: nn.Module) -> None:
        """Raises ValueError if layers would run under vmap with a module that ranks gather in it.

        All ranks raise it.
        """
        inside = {child for child in module.modules() if child is not module}
        if self.sharding is None or self.sharding.gathered.isdisjoint(inside):
            return
        handle: LayerState | None = vars(module).get("_private")
        why = "" if handle is None else handle.whole_because
        why = why or (
            "they are given by a parametrization, or a part of the network is compiled: compute "
            "with them in a module without such layers"
        )
        name = next(plain_name(n) for n, m in self.network.named_modules() if m is module)
        instead = "fully_shard, or FullyShardedDataParallel, around it alone"
        if self.sharding.by_wrapper:
            instead = 'wrap("zero2", network)'
        raise ValueError(
            f"{name or 'the network'} ({type(module).__name__}) computes with parameters of its "
            "own, and the layers in it that ranks gather one by one would have to run under "
            f"torch.vmap with it, since {why}, or use {instead}"
        )

    def remove(self) -> None:
        """Restores the modules' own forwards, and 16-bit gradients of 16-bit parameters."""
        self._uninstall()
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad_dtype = parameter.dtype

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
        if self._session is not None:
            leaves = {p: getattr(owner, name) for p, (owner, name) in owners.items()}
            self._session.leaves.update(leaves)
            self.sharding.entered(module, lambda: tensors_in((args, kwargs)))

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

    # ---- sessions -------------------------------------------------------------------------------

    @contextmanager
    def attached(self, private_step: Recorder | None) -> Iterator[None]:
        """Enters a context in which layers' calls belong to the private step (None: to none)."""
        before = {handle: (handle.private_step, handle.slots) for handle in self.handles}
        outer, self._session = self._session, private_step
        for handle in self.handles:
            handle.private_step = private_step
            handle.slots = {} if private_step is None else private_step.slots[handle.name]
        try:
            with ExitStack() as stack:
                if private_step is not None and private_step.is_compiled:
                    stack.enter_context(any_size())
                    if private_step.policy.may_run_twice:
                        stack.enter_context(reusable_backwards())
                yield
        finally:
            self._session = outer
            for handle in self.handles:
                handle.private_step, handle.slots = before.get(handle, (outer, {}))

    def make_slots(self, private_step: Recorder) -> dict[str, dict[str, Tensor]]:
        """Returns handle -> parameter's name -> slot.

        Slots are made where a layer asks for one; inside a compiled region none can be made, so a
        network with one gets them all beforehand.
        """
        if private_step.is_compiled and (apart := self.apart):
            self.make_whole(apart)
        if not private_step.is_compiled:
            return {handle.name: {} for handle in self.handles}
        return {handle.name: private_step.slots_of(handle) for handle in self.handles}

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
        if parameter in self._copied:
            return getattr(*self._copied[parameter]).detach()
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

    @contextmanager
    def tried(self, args: tuple, kwargs: dict) -> Iterator[Any]:
        """Runs a forward that is only tried, and yields its outputs.

        At the end the network, and objects in the arguments, hold what they held before. On ranks
        that share the network's parameters only the arguments do: FSDP keeps state of its own.
        """
        only_given, state = self.sharding is not None, self.state
        with nullcontext() if state is None else state.rewound(args, kwargs, only_given=only_given):
            yield self.network(*args, **kwargs)

    @contextmanager
    def looked_at(self, before: Callable, after: Callable | None = None) -> Iterator[None]:
        """Enters a context with plain forwards, in which hooks run around each captured module.

        Random generators, the network's own too, and compiled code are not affected.
        """
        with ExitStack() as stack:
            stack.enter_context(self.attached(None))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            modules = every_module(self.network)
            stack.enter_context(same_randomness(modules, self.trigger.device))

            for module in modules:
                if self.sharding is not None and isinstance(module, nn.EmbeddingBag):
                    hook = module.register_forward_pre_hook(refuse_offsets, with_kwargs=True)
                    stack.callback(hook.remove)
                if "_private" in module.__dict__:
                    handle = module._private
                    if handle.inner is not None:
                        stack.callback(setattr, handle, "around", handle.around)
                        handle.around = (before, after)
                        continue
                    hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                    stack.callback(hook.remove)
                    if after is not None:
                        hook = module.register_forward_hook(after, with_kwargs=True)
                        stack.callback(hook.remove)
            yield
