"""Captures a network: its layers deliver per-sample gradients in place of their sum.

Each layer that owns trainable parameters gets a forward that runs its arithmetic as one autograd
function, with detached parameters. In backward this function calls a `PrivateStep`. Outside of a
private step (evaluation, inference, the user's own calls) the layers compute as before.

Layers have no hooks, so `torch.compile`, non-reentrant activation checkpointing and autocast see
plain autograd functions.
"""

import types
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn import Parameter

from dp_clipping.capture.calls import (
    let_copies_be,
    let_copies_be_plain,
    with_signature_of,
    without_repr,
)
from dp_clipping.capture.layer_kinds import ALL, inner_layer, kind_of
from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.ownership import CONTAINERS, can_be_apart, owned, trainable_names
from dp_clipping.capture.unchanged import UnchangedLayers
from dp_clipping.distributed.dtensor import is_fsdp1, owner_of, plain_name
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.layers import inner_call
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.inner_call import Inner
from dp_clipping.layers.registered.registry import refuse_where_unfit
from dp_clipping.torch_compat import own_parameters, stop_intercepting


class Capture(CapturedNetwork):
    """A network whose layers have private forwards, until `remove` restores its own.

    `PrivateModel` makes it.

    Raises:
        ValueError: the network is in evaluation.

    Attributes:
        layers: what captured layers compute with; a step raises if it was changed.
    """

    def __init__(
        self, network: nn.Module, clipping: str = "flat", sharding: Sharding | None = None
    ):
        if not network.training:
            raise ValueError(
                "the network is in evaluation, as from_pretrained() and eval() leave it: call "
                "network.train() before make_private (single modules may stay in evaluation)"
            )
        super().__init__(network, clipping, sharding)
        self._whole: set[nn.Module] = set()
        # Modules that compute with copies of their parameters, whatever their kind is, and of these
        # weights of layers in them.
        self._widened: dict[nn.Module, list[Parameter]] = {}
        self._originals = {  # FSDP puts others in their place
            (module, name): parameter
            for module in network.modules()
            for name, parameter in own_parameters(module).items()
        }
        self._install()

    def _install(self) -> None:
        """Replaces the forwards of all modules that own trainable parameters.

        A module that owns bare parameters runs on the whole batch, and the child layers that it
        calls are captured like any others; or it takes its children under vmap.
        """
        whole_samples = self.sharding is None or self.sharding.tensor_group is None
        is_plain = whole_samples and not self.is_compiled
        self.handles, self.copied = [], {}
        covered: set[nn.Module] = set()  # by a module around them
        for name, module in self.network.named_modules():
            is_widened = module in self._widened
            owns = any(p.requires_grad for p in owned(module))
            if module in covered or not (is_widened or owns):
                continue
            if isinstance(module, CONTAINERS) and not is_widened:
                continue
            kind = "vectorized" if is_widened else kind_of(module)
            if kind == "registered":
                refuse_where_unfit(plain_name(name), module, self.sharding)
            inner = None
            if kind == "vectorized" and is_plain and not is_widened:
                inner = inner_layer(module)
                kind = kind if inner is None else inner.kind
            under_vmap = kind == "vectorized" and (module in self._whole or not is_plain)
            may_be_apart = kind == "vectorized" and not under_vmap
            is_apart = may_be_apart and can_be_apart(module, self.sharding is not None)
            if is_apart:
                covered.update(self._taken_by(module))
            elif kind in ("vectorized", "attention", "recurrent"):
                self._refuse_gathered(module, kind)
                covered.update(module.modules())
            name = plain_name(name) + (" (FSDP)" if is_fsdp1(module) else "")
            self._replace_forward(name, kind, module, is_apart, under_vmap, inner)
        self.layers = UnchangedLayers(self)

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
        records = {n: self.record[self._originals[owner_of(module, n)]] for n in names}
        handle = LayerState(name, kind, module, records)
        handle.children_apart = is_apart
        if under_vmap:
            handle.operations = None
        run = ALL[kind].forward
        handle.learns_outputs, handle.is_linear = ALL[kind].learns_outputs, ALL[kind].is_linear
        if inner is not None:
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
            for own, parameter in handle.records.items():
                self.copied[parameter] = owner_of(module, own)

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

    def make_whole(self, handles: Collection[LayerState]) -> None:
        mine = [m for m in self.network.modules() if vars(m).get("_private") in handles]
        whole = [m for m in mine if vars(m)["_private"].inner is None]
        for module in whole:
            self._refuse_gathered(module)
        self._whole.update(whole)
        for module in mine:
            if vars(module)["_private"].kind != "vectorized":
                self._widened.setdefault(module, [])
        varying = {handle.name for handle in self.handles if handle.varies}
        self._uninstall()
        self._install()
        for handle in self.handles:
            handle.private_step, handle.varies = self.attached_step, handle.name in varying

    def widen(self, modules: Collection[nn.Module], layers: Collection[str]) -> bool:
        mine = [handle for handle in self.handles if handle.name in layers]
        weights = [one.parameter for handle in mine for one in handle.records.values()]
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

    def restart(self) -> None:
        if self._whole or self._widened:
            self._whole, self._widened = set(), {}
            self.make_whole(())

    def let_read(self, weights: dict[nn.Module, list[Parameter]]) -> None:
        if weights:
            self._widened |= weights
            self.make_whole(())

    def _refuse_gathered(self, module: nn.Module, kind: str = "vectorized") -> None:
        """Raises ValueError if ranks gather layers in a module that does not call them, or that
        would run under vmap with them.

        All ranks raise it.
        """
        inside = {child for child in module.modules() if child is not module}
        if self.sharding is None or self.sharding.gathered.isdisjoint(inside):
            return
        instead = "fully_shard, or FullyShardedDataParallel, around it alone"
        if self.sharding.by_wrapper:
            instead = 'wrap("zero2", network)'
        if kind == "attention":
            of_ranks = inside & set(self.sharding.gathered)
            name = next(plain_name(n) for n, m in self.network.named_modules() if m in of_ranks)
            raise ValueError(
                f"{name} is gathered when it is called, and the attention "
                f"({type(module).__name__}) around it reads its parameters without a call: let no "
                f"module inside of an attention be gathered by itself, or use {instead}"
            )
        handle: LayerState | None = vars(module).get("_private")
        why = "" if handle is None else handle.whole_because
        why = why or (
            "they are given by a parametrization, or a part of the network is compiled: compute "
            "with them in a module without such layers"
        )
        name = next(plain_name(n) for n, m in self.network.named_modules() if m is module)
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
