"""One wrapper at a time reduces a parameter's gradient.

Two wrappers over one parameter would both reduce its `.grad` in place, and the result would be
wrong. There are two cases:

- The same network is wrapped again, as in a notebook, while the first wrapper is alive: both can
  be used, in turn. The one that runs a training forward is active; the other has no hooks.
- Two networks share some parameters, as an actor and a critic on one trunk: refused when the
  second one is wrapped, since only the backward distinguishes their gradients.
"""

import gc
import weakref
from typing import Any

from torch import nn

from ddp.internals.gradients import full_names

_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()  # all that are alive


def shared_with_another(module: nn.Module) -> str | None:
    """Returns a complaint if a wrapper of another network reduces a parameter, else None."""
    if (complaint := _shared(module)) is not None:
        gc.collect()  # a wrapper that nothing refers to any more does not count
        complaint = _shared(module)
    return complaint


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


def activate(wrapper: Any) -> None:
    """Makes `wrapper` the one that has hooks, among those of its network.

    Raises:
        RuntimeError: if another one has not finished its step.
    """
    if not wrapper.is_active:
        take_over(wrapper.module)
        _wrappers.add(wrapper)
        wrapper.is_active = True
        wrapper.hooks.attach()


def take_over(module: nn.Module, abandon: bool = False) -> None:
    """Deactivates the wrapper of a network, which may forget an unfinished step if `abandon`."""
    for other in list(_wrappers):
        if other.module is module and other.is_active:
            if other.step.is_in_the_middle() and not abandon:
                raise RuntimeError(
                    f"this network has another wrapper ({type(other).__name__}), which has not "
                    "finished its step: call finish_gradient_synchronization() on that one first"
                )
            other.deactivate()
