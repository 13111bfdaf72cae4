"""Metrics of each step for a callback, with those that ε does not cover kept apart."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

UNPROTECTED = ("loss", "samples", "clipped_fraction", "median_norm", "nonfinite_samples")


class StepMetrics:
    """Calls `call(metrics)` after a step of the optimizer, on every rank.

    Args:
        call: the user's function.
        epsilon: returns ε so far; None: not requested.
        unprotected: names of `UNPROTECTED`.
        every: every how many steps there are metrics.
    """

    def __init__(
        self,
        call: Callable[[dict[str, Any]], object],
        epsilon: Callable[[], float] | None,
        unprotected: Sequence[str],
        every: int,
    ):
        self.call, self.epsilon, self.every = call, epsilon, every
        self.unprotected = (unprotected,) if isinstance(unprotected, str) else tuple(unprotected)
        for name in self.unprotected:
            if name not in UNPROTECTED:
                raise ValueError(
                    f"unprotected={name!r} is unknown: choose from {', '.join(UNPROTECTED)}"
                )

    def attach(self, model: Any, optimizer: Any) -> None:
        """Starts to call `call` after each step of the optimizer."""
        if self.unprotected:
            model.refuse_in_release(f"unprotected={list(self.unprotected)}")
            if model.policy is None:
                raise ValueError(
                    f"mode {model.mode} has no metrics of samples: leave out unprotected="
                )
        model.step_state.keeps_losses |= "loss" in self.unprotected
        optimizer.listeners.append(self)

    def __call__(self, optimizer: Any) -> None:
        """Computes the metrics of the step that was just taken; every rank calls it."""
        if optimizer.steps % self.every:
            return
        metrics: dict[str, Any] = {"step": optimizer.steps}
        settings = optimizer.step_state.settings
        if settings is not None:  # None in mode no_dp
            metrics["noise_multiplier"] = settings.noise_multiplier
            metrics["max_grad_norm"] = optimizer.step_state.sensitivity
        if self.epsilon is not None:
            metrics["epsilon"] = self.epsilon()
        if self.unprotected:
            metrics["unprotected"] = self._looked_at(optimizer.model)
        self.call(metrics)

    def _looked_at(self, model: Any) -> dict[str, float]:
        """Returns the requested metrics, over the samples of all ranks."""
        found: dict[str, float] = {}
        if set(self.unprotected) - {"loss"}:
            statistics = model.norm_statistics()
            norms = model.gather_norms().wait().sum(0).sqrt()
            finite = norms[norms.isfinite()]
            found = {
                "samples": statistics.samples,
                "clipped_fraction": statistics.clipped_fraction,
                "median_norm": float(finite.median()) if finite.numel() else 0.0,
                "nonfinite_samples": statistics.nonfinite,
            }
        if "loss" in self.unprotected:
            reducer, kept = model.step_context.reducer, model.step_state.losses
            here = (
                torch.stack(kept).sum(0)
                if kept
                else torch.zeros(2, dtype=torch.float64, device="cpu")
            )
            table = here.to(device=reducer.device, dtype=torch.float64)
            what = "the losses of a step"
            total, count = reducer.data.sum(table, what, "async").wait().tolist()
            found["loss"] = total / max(1.0, count)
        return {name: found[name] for name in self.unprotected}


def loss_and_count(private_step: Any, losses: Tensor) -> Tensor:
    """Returns the sum of the losses of a step's samples, and how many they are: [2]."""
    losses, padding = losses.detach().double(), private_step.without_loss
    if padding is not None:
        return torch.stack([losses.masked_fill(padding, 0).sum(), (~padding).sum().double()])
    losses = losses[: private_step.real]
    return torch.stack([losses.sum(), losses.new_tensor(float(len(losses)))])
