"""Calls a wrapper when autograd is about to change a gradient, and when it is final."""

import weakref
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ddp.internals.gradients import Gradients
from ddp.internals.watch import Watch
from ddp.torch_compat import at_end_of_backward, in_backward

TensorsOrNone = tuple[Tensor | None, ...]


@dataclass
class Backward:
    """A backward in progress. One that fails leaves `running` or `is_entered` set.

    Attributes:
        running: from its first gradient to its end.
        is_entered: from the gradient of an output of the wrapped network to its end.
        reduces: whether the one that was entered reduces gradients, so that other ranks may have
            launched some.
    """

    running: bool = False
    is_entered: bool = False
    reduces: bool = False

    def enter(self, reduces: bool) -> None:
        """Called by autograd when it has the gradient of an output."""
        self.is_entered, self.reduces = True, reduces
        at_end_of_backward(self._leave)

    def has_failed(self) -> bool:
        """Returns whether the last backward has not come to its end."""
        return self.running or (self.is_entered and not in_backward())  # that computes again

    def forget(self) -> None:
        self.running = self.is_entered = False

    def _leave(self) -> None:
        self.is_entered = False


class Listener(Protocol):
    """The interface that the hooks call; `ddp.base.DataParallel` implements it."""

    is_active: bool
    gradients: Gradients
    watch: Watch

    def before_accumulation(self, i: int) -> None: ...
    def after_accumulation(self, i: int) -> None: ...


class AutogradHooks:
    """Calls `listener.before_accumulation(i)` and `listener.after_accumulation(i)`.

    Both hooks sit on the node that accumulates a parameter's gradient. The second one runs when
    all `register_post_accumulate_grad_hook` hooks of the parameter have run, those that a user adds
    after wrapping too, so that their changes of `.grad` are reduced. A tied parameter's
    hooks run once a backward, with the sum of its uses. They run in autograd's thread, on the
    stream on which the gradient is accumulated, so that a collective started there is queued
    behind the accumulation. `torch.autograd.grad` accumulates nothing and runs neither.

    A node also runs when its gradient is None, as a custom `autograd.Function` may return it.
    Hooks hold the listener weakly. They do nothing while `listener.is_active` is False.
    """

    def __init__(self, listener: Listener, backward: Backward):
        self._listener, self._backward = weakref.ref(listener), backward
        parameters = listener.gradients.parameters
        # Kept here: parameters hold their nodes weakly, and graphs come and go.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles = []
        for i, node in enumerate(self._nodes):
            before, after = self._hooks_of(i)
            self._handles += [node.register_prehook(before), node.register_hook(after)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _active_listener(self) -> Listener | None:
        listener = self._listener()
        return listener if listener is not None and listener.is_active else None

    def _hooks_of(self, i: int):
        def before(_gradients: TensorsOrNone) -> None:
            if (listener := self._active_listener()) is None:
                return
            if not self._backward.running:
                self._backward.running = True
                at_end_of_backward(self._end_backward)
            listener.watch.accumulation_begins(listener.gradients.parameters[i])
            listener.before_accumulation(i)

        def after(_inputs: TensorsOrNone, _gradients: TensorsOrNone) -> None:
            if (listener := self._active_listener()) is None:
                return
            listener.watch.raise_if_changed_by_hook(listener.gradients.parameters[i])
            listener.after_accumulation(i)

        return before, after

    def _end_backward(self) -> None:
        self._backward.running = False
