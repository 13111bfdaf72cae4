"""One training step with its phases named.

The benchmark, the profiler and the tests all call this one step, so the measured step is the
tested one. It has no code for variants, devices or privacy: the caller passes a forward that
returns the loss and whatever must happen between backward and the optimizer.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.profiler import record_function


def training_step(
    batch: Any,
    optimizer: torch.optim.Optimizer,
    *,
    forward_loss: Callable[[Any], Tensor],
    finish: Callable[[], None],
    learning_rate: float,
    more_phases: Mapping[str, Callable[[], None]] = MappingProxyType({}),
    max_gradient_norm: float | None = None,
    clip_gradients: Callable[[list[Parameter], float], Any] = clip_grad_norm_,
    phase: Callable[[str], AbstractContextManager] = record_function,
) -> Tensor:
    """Runs forward, backward, synchronisation, clipping (in warmup) and the optimizer's step.

    Args:
        batch: handed to `forward_loss` as it is.
        optimizer: its gradients are set to None at the end.
        forward_loss: batch -> scalar loss, or what has `backward` and `detach` like one.
        finish: called after backward; when it returns, every `.grad` is synchronised.
        learning_rate: the learning rate of this step, for all parameter groups.
        more_phases: name -> what else comes between `finish` and clipping, in order.
        max_gradient_norm: clip the total gradient norm to this; None leaves it alone.
        clip_gradients: how, for parameters that PyTorch's own cannot take together.
        phase: a context manager that is entered with each phase's name.

    Returns:
        The loss of this rank's batch, detached, on its device.
    """
    with phase("lr_scheduling"):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    with phase("forward_pass"):
        loss = forward_loss(batch)
    with phase("backward_pass"):
        loss.backward()
    with phase("gradient_sync"):
        finish()
    for name, work in more_phases.items():
        with phase(name):
            work()
    if max_gradient_norm is not None:
        with phase("gradient_clipping_warmup"):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_gradients(parameters, max_gradient_norm)
    with phase("optimizer_step"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()
