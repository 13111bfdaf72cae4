"""Raises an error in a step if something has changed that must stay as it was at `make_private`.

UnchangedLayers        what layers compute with, and that frozen normalizations stay so
UnchangedParameters    which parameters there are and are trained, their dtypes and hooks
"""

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.ownership import computation_of
from dp_clipping.distributed.dtensor import plain_name
from dp_clipping.torch_compat import (
    every_module,
    gradient_hooks,
    own_modules,
    own_parameters,
)
from dp_clipping.validation import normalizations, problem_of

IS_TRAINED = attrgetter("requires_grad")


class UnchangedLayers:
    """Remembers what captured modules compute with, and which normalizations are frozen."""

    def __init__(self, capture: CapturedNetwork):
        modules = list(capture.network.named_modules())
        self._before = [
            (plain_name(name), module, *computation_of(module))
            for name, module in modules
            if "_private" in vars(module)
        ]
        self._normalizations = normalizations(capture.network)

    def check(self) -> None:
        """Raises an error if a layer would compute something else than at `make_private`.

        Raises:
            ValueError: `model.train()` has put a normalization in training mode that was accepted
                because it was frozen.
            RuntimeError: methods of a layer, or its class, were replaced.
        """
        for name, module in self._normalizations:
            if problem := problem_of(module):
                raise ValueError(
                    f"{name} ({type(module).__name__}): {problem[0]}; keep it in evaluation: "
                    f"{name or 'it'}.eval() after each model.train()"
                )
        for name, module, forward, kind, own_forward, methods, replaced in self._before:
            own = module.__dict__
            if (
                own.get("forward") != forward
                or type(module) is not kind
                or kind.forward is not own_forward
                or (own.keys() & methods) != replaced
            ):
                raise RuntimeError(
                    f"forward, another method or the class of {name or 'the network'} "
                    f"({type(module).__name__}) was replaced after make_private, and its "
                    "per-sample gradients are of what it computed before: replace methods before "
                    "make_private, or register a forward hook"
                )


class UnchangedParameters:
    """The parameters of a captured network: which there are, which are trainable, their dtypes.

    What is clipped and gets noise, and what the optimizer moves, was settled with them. A hook that
    one is given later would not be called.

    Args:
        is_wrapped: a data-parallel wrapper may have hooks on them too.
    """

    def __init__(self, capture: CapturedNetwork, is_wrapped: bool):
        self.capture, self.network = capture, capture.network
        self._is_wrapped = is_wrapped
        self._hooks = capture.hooks_after_accumulation(is_wrapped)  # which are the model's own
        self._count = sum(map(len, self._hooks))
        # Between forward and backward FSDP has other objects in the place of these.
        self._parameters = dict(self.network.named_parameters())
        self._trainable = {name for name, p in self._parameters.items() if p.requires_grad}
        self._flags = list(map(IS_TRAINED, self._parameters.values()))
        self._dtypes = [(p, p.dtype) for p in capture.parameters]
        self._modules = every_module(self.network)
        self._held = self._hold()

    def check(self) -> None:
        """Raises RuntimeError if trainable parameters, or their hooks, are others than before."""
        for parameter, dtype in self._dtypes:
            if parameter.dtype != dtype:
                raise RuntimeError(
                    f"{self.capture.names[parameter]} was {dtype} at make_private and is "
                    f"{parameter.dtype} now: convert the network before make_private"
                )
        flags = list(map(IS_TRAINED, self._parameters.values()))
        names, objects = self._hold()
        known_names, known = self._held
        if flags != self._flags or names != known_names or not all(map(is_, objects, known)):
            self._refuse_others()
        own = self.capture.parameters
        if any(map(gradient_hooks, own)) or sum(map(len, self._hooks)) > self._count:
            counts = map(len, self.capture.hooks_after_accumulation(self._is_wrapped))
            found = list(filter(gradient_hooks, own))
            found += [p for p, n in zip(own, counts, strict=False) if n > 1]
            hooked = ", ".join(self.capture.names[p] for p in found[:5])
            raise RuntimeError(
                f"{hooked} was given a hook after make_private, which is not called "
                "with the noisy gradient: remove it, and call Tensor.register_hook before "
                "make_private, or change .grad between optimizer.pre_step() and optimizer.step()"
            )

    def _refuse_others(self) -> None:
        """Raises RuntimeError if a parameter was frozen, unfrozen or replaced by another tensor."""
        named = dict(self.network.named_parameters())
        changed = {
            name: "trainable" if p.requires_grad else "frozen"
            for name, p in (named | self._parameters).items()
            if p.requires_grad != (name in self._trainable)
        }
        if changed:
            names = ", ".join(f"{name} ({now} now)" for name, now in list(changed.items())[:5])
            raise RuntimeError(
                f"{names}: freeze and unfreeze before make_private; afterwards set the learning "
                "rate of a parameter group to 0, or use to_standard_module() and make it private "
                "again"
            )
        replaced = [
            name for name in sorted(self._trainable)
            if not self._stands_for(named.get(name), self._parameters[name])
        ]  # fmt: skip
        if replaced:
            raise RuntimeError(
                f"{', '.join(replaced[:5])} of the network is another tensor than at make_private "
                "(load_state_dict(assign=True)? a new module?), which the optimizer does not move: "
                "load without assign=True, or change the network before make_private"
            )

    def _hold(self) -> tuple[list[Any], list[Any]]:
        """Returns the sizes and names of modules' parameters and children, and the objects."""
        dicts: list[dict[str, Any]] = [
            *map(own_parameters, self._modules),
            *map(own_modules, self._modules),
        ]
        names = [*map(len, dicts), *chain.from_iterable(dicts)]
        return names, list(chain.from_iterable(map(dict.values, dicts)))

    def _stands_for(self, now: Tensor | None, before: Parameter) -> bool:
        """Returns whether a tensor is the parameter, or what FSDP has put in its place."""
        sharding = self.capture.sharding
        return now is before or (sharding is not None and sharding.stands_for(now, before))
