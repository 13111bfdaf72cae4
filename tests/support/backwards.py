"""Functions that do something in their backward."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        changed = ctx.change(gradient)
        return gradient if changed is None else changed, None


def with_backward(x: Tensor, change: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Returns a copy; `change` is given its gradient, and may return another for x."""
    return _Copy.apply(x, change)


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


def computed_again(x: Tensor, layer: nn.Module) -> Tensor:
    """Runs the layer again in backward, and its backward inside, as reversible layers do.

    The graph does not show the layer's parameters.
    """
    return _Hidden.apply(x, layer)
