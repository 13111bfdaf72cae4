"""Finds, in a plain forward, modules whose code needs layers or weights that others own."""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from dp_clipping.capture.network import Arguments, CapturedNetwork, plain_run
from dp_clipping.capture.ownership import owned
from dp_clipping.torch_compat import tensors_in


class Uses(TorchFunctionMode):
    """Runs a plain forward, and records which code calls captured layers or reads parameters."""

    def __init__(self, capture: CapturedNetwork, arguments: Arguments):
        super().__init__()
        self._trainable = {id(p): p for p in capture.parameters}
        self._running: list[nn.Module] = []  # outermost first
        self._calls: list[tuple[nn.Module, nn.Module | None]] = []  # of a layer, by a module
        self._reads: dict[nn.Module, list[Parameter]] = {}  # by a module that does not own it
        with ExitStack() as stack:
            for module in capture.network.modules():
                hook = module.register_forward_pre_hook(self._entered)
                stack.callback(hook.remove)
                hook = module.register_forward_hook(self._left, always_call=True)
                stack.callback(hook.remove)
            stack.enter_context(self)
            stack.enter_context(plain_run(capture, *arguments))

    def callers_of(self, layers: Collection[str]) -> list[nn.Module]:
        """Returns the modules whose code calls one of these layers."""
        found = [by for layer, by in self._calls if vars(layer)["_private"].name in layers]
        return [module for module in dict.fromkeys(found) if module is not None]

    def weights_read_elsewhere(self) -> dict[nn.Module, list[Parameter]]:
        """Returns the weights that code outside of their owners computes with, by its module.

        Weights of layers that are also called are left out, unless the module owns parameters:
        these come with all parameters of their layer.
        """
        called = {p: layer for layer, _ in self._calls for p in _captured(layer)}
        found: dict[nn.Module, list[Parameter]] = {}
        for module, weights in self._reads.items():
            handle = vars(module).get("_private")
            for weight in weights:
                if weight not in called:
                    found.setdefault(module, []).append(weight)
                elif handle is not None and handle.kind == "vectorized":
                    found.setdefault(module, []).extend(owned(called[weight]))
        return found

    def _entered(self, module: nn.Module, *_: Any) -> None:
        if "_private" in vars(module):
            self._calls.append((module, self._running[-1] if self._running else None))
        self._running.append(module)

    def _left(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._running and any(y.requires_grad for y in tensors_in(result)):
            for x in tensors_in((args, kwargs or {})):
                if id(x) in self._trainable:
                    self._note(self._trainable[id(x)])
        return result

    def _note(self, parameter: Parameter) -> None:
        """Records the innermost running module that has a parameter, unless one has captured it."""
        if any(parameter is p for module in self._running for p in _captured(module)):
            return
        for module in reversed(self._running):
            if any(parameter is p for p in module.parameters()):
                weights = self._reads.setdefault(module, [])
                if all(parameter is not weight for weight in weights):
                    weights.append(parameter)
                return


def _captured(module: nn.Module) -> list[Parameter]:
    """Returns the parameters that are captured with a module."""
    handle = vars(module).get("_private")
    return [] if handle is None else [one.parameter for one in handle.records.values()]
