"""Finds, in a plain forward, modules whose code needs layers or weights that others own."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from dp_clipping.capture.network import Arguments, CapturedNetwork, plain_run
from dp_clipping.capture.ownership import owned
from dp_clipping.torch_compat import tensors_in


def callers_of(
    capture: CapturedNetwork, arguments: Arguments, layers: Collection[str]
) -> list[nn.Module]:
    """Returns the modules whose code calls one of these layers in a plain forward."""
    found: list[nn.Module] = []

    def note(module: nn.Module, running: list[nn.Module]) -> None:
        handle = vars(module).get("_private")
        is_one = handle is not None and handle.name in layers
        if is_one and running and running[-1] not in found:
            found.append(running[-1])

    with _calls(capture, note), plain_run(capture, *arguments):
        pass
    return found


def weights_read_elsewhere(
    capture: CapturedNetwork, arguments: Arguments
) -> dict[nn.Module, list[Parameter]]:
    """Returns the weights that code outside of their owners computes with, by that code's module.

    Weights of layers that are also called are left out, unless the module owns parameters: these
    come with all parameters of their layer.
    """
    called: dict[Parameter, nn.Module] = {}

    def note(module: nn.Module, running: list[nn.Module]) -> None:
        if (handle := vars(module).get("_private")) is not None:
            called.update((one.parameter, module) for one in handle.records.values())

    with (
        _calls(capture, note) as running, _Reads(capture, running) as reads,
        plain_run(capture, *arguments),
    ):  # fmt: skip
        pass
    found: dict[nn.Module, list[Parameter]] = {}
    for module, weights in reads.found.items():
        handle = vars(module).get("_private")
        for weight in weights:
            if weight not in called:
                found.setdefault(module, []).append(weight)
            elif handle is not None and handle.kind == "vectorized":
                found.setdefault(module, []).extend(owned(called[weight]))
    return found


@contextmanager
def _calls(
    capture: CapturedNetwork, note: Callable[[nn.Module, list[nn.Module]], None]
) -> Iterator[list[nn.Module]]:
    """Enters a context that looks at calls of modules; yields those running, outermost first.

    Args:
        note: called with each module that is called, and the modules that are running.
    """
    running: list[nn.Module] = []

    def entered(module: nn.Module, *_: Any) -> None:
        note(module, running)
        running.append(module)

    with ExitStack() as stack:
        for module in capture.network.modules():
            hook = module.register_forward_pre_hook(entered)
            stack.callback(hook.remove)
            hook = module.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
            stack.callback(hook.remove)
        yield running


class _Reads(TorchFunctionMode):
    """Records parameters that running code computes with and no running layer owns."""

    def __init__(self, capture: CapturedNetwork, running: list[nn.Module]):
        super().__init__()
        self._trainable = {id(p): p for p in capture.parameters}
        self._running = running
        self.found: dict[nn.Module, list[Parameter]] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._running and any(y.requires_grad for y in tensors_in(result)):
            for x in tensors_in((args, kwargs or {})):
                if id(x) in self._trainable and not self._is_own(x):
                    self._note(self._trainable[id(x)])
        return result

    def _note(self, parameter: Parameter) -> None:
        """Records the innermost running module that has the parameter."""
        for module in reversed(self._running):
            if any(parameter is p for p in module.parameters()):
                weights = self.found.setdefault(module, [])
                if all(parameter is not weight for weight in weights):
                    weights.append(parameter)
                return

    def _is_own(self, parameter: Parameter) -> bool:
        handles = (vars(module).get("_private") for module in self._running)
        return any(
            parameter is own.parameter
            for handle in handles
            if handle is not None
            for own in handle.records.values()
        )
