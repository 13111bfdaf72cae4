"""One wrapper at a time reduces a parameter's gradient.

Two wrappers over one parameter would both reduce its `.grad` in place, and the result would be
wrong. There are two cases:

- The same network is wrapped again, as in a notebook, while the first wrapper is alive: both can
  be used, in turn. The one that runs a training forward is active; the other's hooks do nothing.
- Two networks share some parameters, as an actor and a critic on one trunk: refused when the
  second one is wrapped, since only the backward distinguishes their gradients.
"""

import gc
import weakref
from typing import Protocol

from torch import nn
from torch.nn import Parameter

from ddp.internals.dtypes import give_back
from ddp.internals.gradients import Gradients, full_names
from ddp.internals.hooks import AutogradHooks


class Owner(Protocol):
    """A wrapper that reduces gradients while it is active."""

    module: nn.Module
    is_active: bool

    def is_in_mid_step(self) -> bool: ...
    def deactivate(self) -> None: ...


_wrappers: weakref.WeakSet[Owner] = weakref.WeakSet()  # all that are alive


def shared_with_another(module: nn.Module) -> str | None:
    """Returns a complaint if a wrapper of another network reduces a parameter, else None."""
    if (complaint := _shared(module)) is not None:
        gc.collect()  # a wrapper that nothing refers to any more does not count
        complaint = _shared(module)
    return complaint


def _shared(module: nn.Module) -> str | None:
    names = _trainable(module)
    for other in list(_wrappers):
        if other.module is module:
            continue
        for parameter, theirs in _trainable(other.module).items():
            if parameter in names:
                return (
                    f"{names[parameter]} is a parameter of another wrapped network too, as "
                    f"{theirs}, and each wrapper would reduce its gradient: wrap one nn.Module "
                    "that holds both networks, or delete the other wrapper first"
                )
    return None


def _trainable(module: nn.Module) -> dict[Parameter, str]:
    return {p: name for p, name in full_names(module).items() if p.requires_grad}


def enter(wrapper: Owner, hooks: AutogradHooks, gradients: Gradients) -> None:
    """Registers `wrapper`. When it is freed, its hooks are removed and its dtypes restored."""
    _wrappers.add(wrapper)
    weakref.finalize(wrapper, _leave, hooks, gradients.dtypes.given).atexit = False


def _leave(hooks: AutogradHooks, given_dtypes: dict) -> None:
    hooks.remove()
    give_back(given_dtypes)


def activate(wrapper: Owner, abandon: bool = False) -> None:
    """Makes `wrapper` the one whose hooks work, among those of its network.

    Args:
        abandon: forget a step that the other has not finished, as for a new wrapper.

    Raises:
        RuntimeError: if the other has not finished its step, unless `abandon`.
    """
    if wrapper.is_active and not abandon:
        return
    for other in list(_wrappers):
        if other is wrapper or other.module is not wrapper.module or not other.is_active:
            continue
        if other.is_in_mid_step() and not abandon:
            raise RuntimeError(
                f"this network has another wrapper ({type(other).__name__}), which has not "
                "finished its step: call finish_gradient_synchronization() on that one first"
            )
        other.deactivate()
    wrapper.is_active = True
