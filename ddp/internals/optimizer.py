"""The optimizer of a network of which every rank holds all.

Sharded variants have the same three methods (ddp/sharded/interface.py), so that a training loop
does not ask which variant it trains.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer


class Replicated:
    """Methods of a wrapper whose parameters and reduced gradients are whole on every rank."""

    module: nn.Module
    made: tuple[weakref.ref[Optimizer], ...] = ()
    """The optimizers of this network, in the order in which every rank has made them."""

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        """Returns an optimizer: `optimizer = model.make_optimizer(torch.optim.AdamW, lr=1e-3)`.

        Args:
            cls: the class of the optimizer.
            params: parameters or parameter groups; default all trainable parameters.
            options: further arguments of `cls`.
        """
        optimizer = cls(trainable(self.module) if params is None else params, **options)
        self.made = (*self.made, weakref.ref(optimizer))
        return optimizer

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradient to a norm of at most `max_norm`; returns the norm it had.

        Call it between `finish_gradient_synchronization()` and `optimizer.step()`.
        """
        return torch.nn.utils.clip_grad_norm_(trainable(self.module), max_norm)

    def whole_gradients(self) -> list[Tensor | None]:
        """Returns the reduced gradient of each parameter, in the order of `parameters()`."""
        return [parameter.grad for parameter in self.module.parameters()]


def trainable(module: nn.Module) -> list[Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
