"""The parts of a training step, with or without privacy, and those that follow from its model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ddp_by_hand.bench.sharded import by_mesh, clip_gradients

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepParts:
    """Holds the arguments of `lm.training.training_step`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward_loss: Callable[[Batch], Tensor]
    finish: Callable[[], None]
    more_phases: Mapping[str, Callable[[], None]]
    clip_gradients: Callable[[list[Parameter], float], Any] = clip_gradients


def make_optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns AdamW: the wrapper's own, or over the parameters of a network or a plug-in."""
    if hasattr(model, "make_optimizer"):
        return model.make_optimizer(torch.optim.AdamW, **options)
    groups = [{"params": own} for own in by_mesh(list(model.parameters()))]
    return torch.optim.AdamW(groups, **options)


def clipping_of(model: nn.Module) -> Callable[[list[Parameter], float], Any]:
    """Returns how gradients are clipped: as the wrapper does, which may have a part of them."""
    if hasattr(model, "clip_grad_norm_"):
        return lambda _parameters, limit: model.clip_grad_norm_(limit)
    return clip_gradients
