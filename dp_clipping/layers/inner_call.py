"""A subclass of a layer whose own forward calls the layer's: `super().forward(ids) * self.scale`.

Its forward runs as it is. Its call of `torch.nn.functional` with the layer's own parameters and
options is captured, and gets the layer's arithmetic. If its code computes with these parameters in
another way, it runs under `torch.vmap` instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_clipping.torch_compat import tree_leaves

NORM = {"input": None, "normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5}
CONVOLUTION = {
    "input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1,
    "groups": 1,
}  # fmt: skip
EMBEDDING = {
    "input": None, "weight": None, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
    "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip


@dataclass(frozen=True)
class Inner:
    """The layer that a subclass is of.

    Attributes:
        kind: the kind of the layer's arithmetic.
        base: its class, as PyTorch has it.
        function: what its forward calls.
        options: names of that function's arguments, in order -> their defaults.
    """

    kind: str
    base: Any
    function: Callable[..., Any]
    options: dict[str, Any]

    def input_of(
        self, module: nn.Module, function: Callable, args: tuple, kwargs: dict
    ) -> Tensor | None:
        """Returns the layer's input in a call; None: the call is not the layer's own."""
        if function is not self.function:
            return None
        given = self.options | dict(zip(self.options, args, strict=False)) | kwargs
        x = given.pop("input")
        if getattr(module, "padding_mode", "zeros") != "zeros":
            return None
        for name, value in given.items():
            own = getattr(module, name, None)
            if value is not own and not _is_same(value, own):
                return None
        return x


LAYERS = (
    Inner("linear", nn.Linear, F.linear, {"input": None, "weight": None, "bias": None}),
    Inner("embedding", nn.Embedding, F.embedding, EMBEDDING),
    Inner("convolution", nn.Conv1d, F.conv1d, CONVOLUTION),
    Inner("convolution", nn.Conv2d, F.conv2d, CONVOLUTION),
    Inner("convolution", nn.Conv3d, F.conv3d, CONVOLUTION),
    Inner("layer_norm", nn.LayerNorm, F.layer_norm, NORM),
    Inner("rms_norm", nn.RMSNorm, F.rms_norm, {k: None for k in NORM if k != "bias"}),
    Inner(
        "group_norm", nn.GroupNorm, F.group_norm,
        {"input": None, "num_groups": None, "weight": None, "bias": None, "eps": 1e-5},
    ),
)  # fmt: skip


def inner_of(kind: type) -> Inner | None:
    """Returns the layer that a class is derived from; None if it is none of the known layers."""
    return next((inner for inner in LAYERS if issubclass(kind, inner.base)), None)


def _is_same(given: Any, own: Any) -> bool:
    if isinstance(given, Tensor) or isinstance(own, Tensor):
        return given is own
    if isinstance(given, list | tuple) and isinstance(own, list | tuple):
        return tuple(given) == tuple(own)
    return type(given) is type(own) and given == own


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the subclass's forward, in which the layer's own call is captured."""
    handle = vars(self)["_private"]
    if handle.private_step is None and handle.watch is None:
        return type(self).forward(self, *args, **kwargs)
    with _Calls(self):
        return type(self).forward(self, *args, **kwargs)


class _Calls(TorchFunctionMode):
    """Captures the layer's own call, and notes others that compute with its parameters."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module, self._handle = module, vars(module)["_private"]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        module, handle, kwargs = self._module, self._handle, kwargs or {}
        x = handle.inner.input_of(module, function, args, kwargs)
        if x is not None:
            return self._layer(x)
        result = function(*args, **kwargs)
        own = set(map(id, map(partial(getattr, module), handle.trainable)))
        if not own.isdisjoint(map(id, tree_leaves((args, kwargs)))):
            made = tree_leaves(result)
            handle.is_misfit |= any(isinstance(y, Tensor) for y in made)
        return result

    def _layer(self, x: Tensor) -> Any:
        """Runs the layer, or gives its call to what watches those of captured layers."""
        handle, watch = self._handle, self._handle.watch
        is_plain = handle.private_step is None
        layer = handle.inner.base.forward if is_plain else handle.inner_forward
        run = partial(layer, self._module)
        return run(x) if watch is None else watch(self._module, run, x)
