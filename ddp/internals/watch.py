"""Checks the assumptions of a step about its parameters.

They are those that were wrapped: an optimizer's step on a replaced or thawed parameter would use a
gradient that is not reduced. And they do not change between their gradient's arrival and the end of
`finish_gradient_synchronization`: an optimizer that steps there uses this rank's gradient alone.
A tensor counts the writes to it (`_version`), so neither check reads a value. Fused optimizers
write without being counted; a hook of all optimizers records their steps.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp.internals.gradients import Gradients
from ddp.torch_compat import own_parameters, version_of, without_torch_functions

STEPPED = (
    "{name} was changed after its backward and before its gradient was reduced, so the ranks may "
    "now differ: call finish_gradient_synchronization() between backward() and optimizer.step(), "
    "and wrap the network again, which gives every rank the values of rank 0"
)
STEPPED_IN_HOOK = (
    "{name} was changed by a hook before its gradient was reduced, so the ranks now differ: an "
    "optimizer that steps in backward cannot be used here; call optimizer.step() after "
    "finish_gradient_synchronization()"
)
REPLACED = (
    "{name} is trainable, but not one of the parameters that were wrapped (replaced, as by "
    "load_state_dict(assign=True), added, converted (even if back), or frozen when the network "
    "was wrapped): no gradient of it would be reduced. Wrap the network again: model = wrap(..., "
    "model.module)"
)

_watches: weakref.WeakSet = weakref.WeakSet()  # all that are alive


@register_optimizer_step_post_hook
def _tell_all(optimizer: Optimizer, *_arguments: Any) -> None:
    for watch in list(_watches):
        watch.optimizer_stepped(optimizer)


class Watch:
    """Checks the parameters of one wrapper, which are those of `gradients`."""

    def __init__(self, gradients: Gradients):
        self._names = gradients.names
        self._wrapped = {id(p): (p, p.dtype, p.device) for p in gradients.parameters}
        with without_torch_functions():  # a parameter's node in the graph is not its values
            self._memory = {p: weakref.ref(p.untyped_storage()) for p in gradients.parameters}
            self._nodes = {p: get_gradient_edge(p).node for p in gradients.parameters}
        self._versions: dict[Parameter, int] = {}
        self._accumulating: dict[Parameter, int] = {}
        _watches.add(self)

    def accumulation_begins(self, parameter: Parameter) -> None:
        """Notes that the gradient is about to be added, before hooks of the user."""
        self._accumulating[parameter] = version_of(parameter)

    def raise_if_changed_by_hook(self, parameter: Parameter) -> None:
        """Raises RuntimeError if a hook has written to the parameter since accumulation began."""
        if version_of(parameter) != self._accumulating.pop(parameter, version_of(parameter)):
            raise RuntimeError(STEPPED_IN_HOOK.format(name=self._names[parameter]))

    def gradient_arrived(self, parameter: Parameter) -> None:
        self._versions[parameter] = version_of(parameter)

    def call(self, module: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls the module, which may write to parameters, as Embedding(max_norm=1) does."""
        unchanged = self.complaint() is None
        output = module(*args, **kwargs)
        if unchanged:
            self.accept_changes()
        return output

    def accept_changes(self) -> None:
        """Accepts the changes so far: of the forward itself, or of a loaded checkpoint."""
        for parameter in self._versions:
            self._versions[parameter] = version_of(parameter)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        for noted in (self._versions, self._accumulating):  # both empty once a step is finished
            if noted:
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if parameter in noted and parameter.grad is not None:
                        noted[parameter] = -1

    def end_step(self) -> None:
        self._versions.clear()
        self._accumulating.clear()

    def complaint(self) -> str | None:
        """Names a parameter that was changed after its gradient's arrival, if there is one."""
        for parameter, version in self._versions.items():
            if version_of(parameter) != version:
                return STEPPED.format(name=self._names[parameter])
        return None

    def raise_if_replaced(self, module: nn.Module) -> None:
        """Raises if a parameter was replaced, but not by `torch.func.functional_call`."""
        for owner in module.modules():
            for name, p in own_parameters(owner).items():
                if p is None or not p.requires_grad or not isinstance(p, Parameter):
                    continue
                if self._wrapped.get(id(p)) != (p, p.dtype, p.device):
                    raise RuntimeError(REPLACED.format(name=_full_name(module, owner, name)))
                with without_torch_functions():
                    memory = p.untyped_storage()
                if self._memory[p]() is not memory:
                    # Converted and back, it has another node, without the hooks.
                    with without_torch_functions():
                        is_same = get_gradient_edge(p).node is self._nodes[p]
                    if not is_same:
                        raise RuntimeError(REPLACED.format(name=_full_name(module, owner, name)))
                    self._memory[p] = weakref.ref(memory)


def _full_name(module: nn.Module, owner: nn.Module, name: str) -> str:
    prefix = next(path for path, part in module.named_modules() if part is owner)
    return f"{prefix}.{name}" if prefix else name
