"""Checks the assumptions of a step about its parameters.

They are those that were wrapped: an optimizer's step on a replaced or thawed parameter would use a
gradient that is not reduced. And they do not change between their gradient's arrival and the end of
`finish_gradient_synchronization`: an optimizer that steps there uses this rank's gradient alone.
A tensor counts the writes to it (`_version`), so neither check reads a value. Fused optimizers
write without being counted; the steps of those that `make_optimizer` has made are counted.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.gradients import Gradients
from ddp.torch_compat import own, version_of, without_torch_functions

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
    "load_state_dict(assign=True), added, or frozen when the network was wrapped): no gradient of "
    "it would be reduced. Wrap the network again: model = wrap(..., model.module)"
)


class Watch:
    """Checks the parameters of one wrapper, which are those of `gradients`.

    Attributes:
        arrived: version of each parameter whose gradient is on its way.
        buffers: the dictionary of each module that holds its own buffers.
    """

    def __init__(self, module: nn.Module, gradients: Gradients):
        self._names, self._parameters = gradients.names, gradients.parameters
        self._index_of = gradients.index_of
        self.arrived: dict[int, int] = {}
        self._look(module)

    def call(self, module: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls the module, which may write to parameters, as Embedding(max_norm=1) does."""
        unchanged = self.complaint() is None
        output = module(*args, **kwargs)
        if unchanged:
            self.accept_changes()
        return output

    def accept_changes(self) -> None:
        """Accepts the changes so far: of the forward itself, or of a loaded checkpoint."""
        for i in self.arrived:
            self.arrived[i] = version_of(self._parameters[i])

    def complaint(self) -> str | None:
        """Names a parameter that was changed after its gradient's arrival, if there is one."""
        for i, version in self.arrived.items():
            if version_of(self._parameters[i]) != version:
                return STEPPED.format(name=self._names[i])
        return None

    def raise_if_replaced(self, module: nn.Module) -> None:
        """Raises if a parameter was added, but not by `torch.func.functional_call`."""
        with without_torch_functions():
            if self._seen == self._state():
                return
            for name, p in module.named_parameters():
                if isinstance(p, Parameter) and p.requires_grad and self._index_of(p) < 0:
                    raise RuntimeError(REPLACED.format(name=name))
            self._look(module)

    def _look(self, module: nn.Module) -> None:
        """Notes what is compared in each forward, which is cheaper than a walk through it."""
        self._modules = list(module.modules())  # kept, so that an address is not used again
        self._parts = [own(m, kind) for m in self._modules for kind in ("parameters", "modules")]
        self.buffers = [own(m, "buffers") for m in self._modules]
        self._frozen = [p for p in module.parameters() if self._index_of(p) < 0]
        self._seen = self._state()

    def _state(self) -> list:
        parts = [tuple(map(id, part.values())) for part in self._parts]
        return [parts, [p.requires_grad for p in self._frozen]]


def count_writes(optimizer: Optimizer, *_arguments: Any) -> None:
    """Counts the writes of an optimizer's step: PyTorch does not count those of a fused one."""
    increment_version(
        [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    )
