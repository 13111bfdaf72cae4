"""How autograd tells the wrapper that a gradient is about to change, and that it is final."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter


def register_hooks(wrapper: Any, parameters: Sequence[Parameter]) -> None:
    """Call `wrapper.before_gradient(parameter)` and, after it, `wrapper.gradient_ready(parameter)`.

    A tied parameter's hooks run once a backward, with the sum of its uses. They run in autograd's
    thread, on the stream on which the gradient is accumulated, so that a collective started there
    is queued behind the accumulation. `torch.autograd.grad` accumulates nothing and runs neither:
    the first hook sits on the node that accumulates, not on the parameter.

    `wrapper._in_backward` is True from a backward's first hook to its end, which a failed backward
    never reaches. Hooks hold the wrapper weakly, and leave the parameters when it goes.
    """
    me = weakref.ref(wrapper)

    def before(parameter: Parameter):
        def hook(_gradients: tuple[Tensor | None, ...]) -> None:
            if (wrapper := me()) is None:
                return
            if not wrapper._in_backward:
                wrapper._in_backward = True
                Variable._execution_engine.queue_callback(end_of_backward)
            wrapper.before_gradient(parameter)

        return hook

    def end_of_backward() -> None:
        if (wrapper := me()) is not None:
            wrapper._in_backward = False

    def after(parameter: Parameter) -> None:
        if (wrapper := me()) is not None:
            wrapper.gradient_ready(parameter)

    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    wrapper._accumulation_nodes = nodes  # parameters hold them weakly, and graphs come and go
    handles = [n.register_prehook(before(p)) for n, p in zip(nodes, parameters, strict=True)]
    handles += [p.register_post_accumulate_grad_hook(after) for p in parameters]
    weakref.finalize(wrapper, remove_all, handles)


def remove_all(handles: list) -> None:
    for handle in handles:
        handle.remove()
