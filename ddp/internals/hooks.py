"""Calls a wrapper when autograd is about to change a gradient, and when it is final.

One wrapper has hooks on a parameter: two would both reduce its `.grad` in place, and the result
would be wrong. There are two cases:

- The same network is wrapped again, as in a notebook, while the first wrapper is alive: the last
  one is used, and the others raise.
- Two networks share some parameters, as an actor and a critic on one trunk: refused when the
  second one is wrapped, since only the backward distinguishes their gradients.
"""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp.internals.gradients import full_names
from ddp.internals.watch import STEPPED_IN_HOOK
from ddp.torch_compat import version_of, without_torch_functions

TensorsOrNone = tuple[Tensor | None, ...]

_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()  # that have hooks


class AutogradHooks:
    """Calls `wrapper.before_accumulation(i)` and `wrapper.after_accumulation(i)`.

    Both hooks sit on the node that accumulates a parameter's gradient. The second one runs when
    all `register_post_accumulate_grad_hook` hooks of the parameter have run, those that a user adds
    after wrapping too, so that their changes of `.grad` are reduced. A tied parameter's
    hooks run once a backward, with the sum of its uses. They run in autograd's thread, on the
    stream on which the gradient is accumulated, so that a collective started there is queued
    behind the accumulation. `torch.autograd.grad` accumulates nothing and runs neither.

    A node also runs when its gradient is None, as a custom `autograd.Function` may return it. The
    first method is called only where `.grad` holds something, or will when a collective ends.
    Hooks hold the wrapper weakly.
    """

    def __init__(self, wrapper: Any):
        self._gradients = wrapper.gradients
        # Kept here: parameters hold their nodes weakly, and graphs come and go.
        with without_torch_functions():  # a parameter's node in the graph is not its values
            self._nodes = [get_gradient_edge(p).node for p in self._gradients.parameters]
        self._handles: list = []
        _wrappers.add(wrapper)
        for i, node in enumerate(self._nodes):
            before, after = hooks_of(wrapper, i)
            self._handles += [node.register_prehook(before), node.register_hook(after)]

    def remove(self) -> None:
        """Leaves the parameters as they were before they were wrapped."""
        if self._handles:  # once: another wrapper may have set types since
            self._gradients.dtypes.give_back()
        while self._handles:
            self._handles.pop().remove()


def hooks_of(wrapper: Any, i: int):
    """Returns what a node calls before it accumulates gradient `i`, and afterwards."""
    gradients, schedule, step = wrapper.gradients, wrapper.schedule, wrapper.step
    parameter, find_wrapper = gradients.parameters[i], weakref.ref(wrapper)
    began = 0  # version of the parameter before hooks of the user

    def before(incoming: TensorsOrNone) -> None:
        nonlocal began
        if not step.in_backward:
            step.begin_backward()
        began = version_of(parameter)
        if incoming[0] is not None:
            gradients.filled.discard(i)
        in_flight = schedule.bucket_of[i] in schedule.in_flight  # set to None meanwhile
        if parameter.grad is not None or in_flight:
            with torch.no_grad():
                find_wrapper().before_accumulation(i)

    def after(_inputs: TensorsOrNone, _gradients: TensorsOrNone) -> None:
        if hasattr(parameter, "full_name"):  # a stand-in, as `fsdp` has outside of blocks
            raise RuntimeError(parameter.too_early.format(name=parameter.full_name))
        if version_of(parameter) != began:
            raise RuntimeError(STEPPED_IN_HOOK.format(name=gradients.names[i]))
        if torch.is_grad_enabled():  # as with create_graph=True
            with torch.no_grad():
                find_wrapper().after_accumulation(i)
        else:
            find_wrapper().after_accumulation(i)

    return before, after


def shared_with_another(module: nn.Module) -> str | None:
    """Returns a complaint if a wrapper of another network reduces a parameter, else None."""
    if _shared(module) is not None:
        gc.collect()  # a wrapper that nothing refers to any more does not count
    return _shared(module)


def _shared(module: nn.Module) -> str | None:
    names = full_names(module)
    for other in list(_wrappers):
        if other.module is module:
            continue
        for parameter, theirs in full_names(other.module).items():
            if parameter.requires_grad and parameter in names:
                return (
                    f"{names[parameter]} is a parameter of another wrapped network too, as "
                    f"{theirs}, and each wrapper would reduce its gradient: wrap one nn.Module "
                    "that holds both networks, or delete the other wrapper first"
                )
    return None


def retire_others(module: nn.Module) -> None:
    """Takes their hooks from earlier wrappers of a network."""
    for other in list(_wrappers):
        if other.module is module:
            _wrappers.discard(other)
            other.retire()
