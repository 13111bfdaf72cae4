"""Calls a wrapper when autograd is about to change a gradient, and when it is final."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ddp.internals.gradients import Gradients
from ddp.internals.step import Step
from ddp.internals.watch import Watch
from ddp.torch_compat import version_of

TensorsOrNone = tuple[Tensor | None, ...]


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

    def __init__(self, wrapper: Any, gradients: Gradients, step: Step, watch: Watch):
        self._wrapper = weakref.ref(wrapper)
        self._gradients, self._step, self._watch = gradients, step, watch
        # Kept here: parameters hold their nodes weakly, and graphs come and go.
        self._nodes = [get_gradient_edge(parameter).node for parameter in gradients.parameters]
        self._handles: list = []

    def attach(self) -> None:
        for i, node in enumerate(self._nodes):
            before, after = self._hooks_of(i)
            self._handles += [node.register_prehook(before), node.register_hook(after)]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hooks_of(self, i: int):
        parameter, find_wrapper = self._gradients.parameters[i], self._wrapper
        step, watch, gradients = self._step, self._watch, self._gradients
        began = watch.began

        def before(_gradients: TensorsOrNone) -> None:
            if not step.in_backward:
                step.begin_backward()
            began[i] = version_of(parameter)
            wrapper = find_wrapper()
            schedule = wrapper.schedule
            if (
                parameter.grad is not None
                or i in gradients.stand_ins
                or schedule.bucket_of[i] in schedule.in_flight  # set to None meanwhile
            ):
                with torch.no_grad():
                    wrapper.before_accumulation(i)

        def after(_inputs: TensorsOrNone, _gradients: TensorsOrNone) -> None:
            if version_of(parameter) != began[i]:
                watch.raise_changed_by_hook(i)
            if torch.is_grad_enabled():  # as with create_graph=True
                with torch.no_grad():
                    find_wrapper().after_accumulation(i)
            else:
                find_wrapper().after_accumulation(i)

        return before, after
