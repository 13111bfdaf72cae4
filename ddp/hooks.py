"""How autograd tells the wrapper that a gradient is about to change, and that it is final."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from ddp.torch_compat import at_end_of_backward

Gradients = tuple[Tensor | None, ...]


def register_hooks(wrapper: Any, parameters: Sequence[Parameter]) -> list:
    """Call `wrapper.before_gradient(parameter)` and, after it, `wrapper.gradient_ready(parameter)`.

    Both hooks sit on the node that accumulates a parameter's gradient. The second one runs when
    all `register_post_accumulate_grad_hook` hooks of the parameter have run, those that a user adds
    after wrapping too, so that what they make of `.grad` is what is reduced. A tied parameter's
    hooks run once a backward, with the sum of its uses. They run in autograd's thread, on the
    stream on which the gradient is accumulated, so that a collective started there is queued
    behind the accumulation. `torch.autograd.grad` accumulates nothing and runs neither.

    A node also runs when its gradient is None, as a custom `autograd.Function` may return it.
    If there is then nothing in `.grad`, `wrapper.gradient_absent(parameter)` is called instead.

    `wrapper._in_backward` is True from a backward's first hook to its end, which a failed backward
    never reaches. Hooks hold the wrapper weakly. They do nothing while `wrapper._is_active` is
    False.

    Returns:
        handles, whose `remove()` takes the hooks away.
    """
    me = weakref.ref(wrapper)

    def active() -> Any:
        wrapper = me()
        return wrapper if wrapper is not None and wrapper._is_active else None

    def hooks_of(parameter: Parameter):
        def before(_gradients: Gradients) -> None:
            if (wrapper := active()) is None:
                return
            if not wrapper._in_backward:
                wrapper._in_backward = True
                at_end_of_backward(end_of_backward)
            wrapper._watch.accumulation_begins(parameter)
            wrapper.before_gradient(parameter)

        def after(_inputs: Gradients, _gradients: Gradients) -> None:
            if (wrapper := active()) is None:
                return
            if wrapper._watch.is_changed_by_hook(parameter):
                raise RuntimeError(
                    f"{wrapper._names[parameter]} was changed by a hook before its gradient was "
                    "reduced, so the ranks now differ: an optimizer that steps in backward cannot "
                    "be used here; call optimizer.step() after finish_gradient_synchronization()"
                )
            if parameter.grad is None:
                wrapper.gradient_absent(parameter)
            else:
                wrapper.gradient_ready(parameter)

        return before, after

    def end_of_backward() -> None:
        if (wrapper := me()) is not None:
            wrapper._in_backward = False

    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    wrapper._accumulation_nodes = nodes  # parameters hold them weakly, and graphs come and go
    handles = []
    for node, parameter in zip(nodes, parameters, strict=True):
        before, after = hooks_of(parameter)
        handles += [node.register_prehook(before), node.register_hook(after)]
    return handles
