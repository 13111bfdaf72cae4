"""Tries modules whose child layers run outside of vmap, before a step relies on it.

What could be wrong there shows in one forward: the module's own code computes with a weight of a
child, calls it with what is no sample's, or cannot run. Such a module takes its children under vmap
with it, which is right for any.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_clipping.capture.batch import map_tensors, tensors_in
from dp_clipping.capture.network import CapturedNetwork, expanded_output
from dp_clipping.capture.randomness import generator_states, without_dropout
from dp_clipping.layers.attention.core import fits
from dp_clipping.layers.batch_layout import is_close
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.vmap.module import plain_forward
from dp_clipping.torch_compat import current_vmap


def unfit_modules(capture: CapturedNetwork, arguments: tuple, batch_size: int) -> list[LayerState]:
    """Returns the modules that must run under vmap with their children.

    Args:
        arguments: positional and keyword arguments of a forward of `batch_size` samples.
    """
    attentions: list[Any] = [
        module
        for module in capture.network.modules()
        if "_private" in vars(module) and module._private.kind == "attention"
    ]
    found: list[LayerState] = [
        m._private for m in attentions if not fits(m.batch_first, m._private.layouts)
    ]
    if not capture.apart:
        return found
    args, kwargs = arguments
    for handle in capture.handles:
        handle.trial = partial(_try, found, capture, batch_size)
    try:
        with (
            capture.looked_at(lambda *_: None),
            without_dropout(capture.network),
            torch.set_grad_enabled(capture.sharding is None),
        ):
            capture.network(*args, **kwargs)
    finally:
        for handle in capture.handles:
            handle.trial = None
    return found


def _try(
    unfit: list[LayerState], capture: CapturedNetwork, batch_size: int,
    every_sample: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict,
) -> Any:  # fmt: skip
    """Returns what a module returns in a plain forward; notes it if it is unfit.

    Args:
        every_sample: runs the module under vmap: see `layers.vmap.module`.
    """
    handle: LayerState = vars(module)["_private"]
    if not handle.children_apart or handle in unfit:
        return plain_forward(module, *args, **kwargs)
    copied_args, copied_kwargs = map_tensors(Tensor.clone, (args, kwargs))
    before = generator_states(capture.network.modules(), capture.trigger.device)
    plain = plain_forward(module, *args, **kwargs)
    is_random = generator_states(capture.network.modules(), capture.trigger.device) != before
    layouts = handle.output_layouts.get(tuple(x.dim() for x in tensors_in((args, kwargs))), ())
    try:
        run = partial(every_sample, batch_size=batch_size, args=copied_args, kwargs=copied_kwargs)
        expected = expanded_output(handle, layouts, plain, batch_size)
        if not _agrees(module, run, batch_size, expected, is_random):
            unfit.append(handle)
    except Exception:  # under vmap with its children it may be fine, and if not will say why
        unfit.append(handle)
    return plain


def _agrees(
    module: nn.Module, run: Callable[..., Any], batch_size: int, expected: Any, is_random: bool
) -> bool:
    """Returns whether it computes what a plain forward does, with its own parameters alone."""
    handle: LayerState = vars(module)["_private"]
    own = handle.parameters()
    copies = {n: p.detach().expand(batch_size, *p.shape) for n, p in own.items()}
    others = {id(p) for p in module.parameters() if p.requires_grad}
    with _Uses(others - {id(p) for p in own.values()}) as uses:
        found = tensors_in(run(module, copies))
    wanted = tensors_in(expected)
    if uses.found or [y.shape for y in found] != [y.shape for y in wanted]:
        return False
    return is_random or all(is_close(*pair) for pair in zip(found, wanted, strict=True))


class _Uses(TorchFunctionMode):
    """Notes whether code under vmap computes with one of some parameters."""

    def __init__(self, parameters: set[int]):
        super().__init__()
        self._parameters, self.found = parameters, False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # Outside of vmap it is the layer that owns the parameter; a dtype or shape is no use.
        if not self.found and tensors_in(result):
            given = tensors_in((args, kwargs or {}))
            self.found = current_vmap() is not None and any(
                id(x) in self._parameters for x in given
            )
        return result
