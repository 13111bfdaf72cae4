"""A private step in plain PyTorch: norms as layers hand over, sums layer by layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.clipping.accumulation import Weights, squared_norms, weighted_sum
from dp_clipping.clipping.coefficients import coefficients, finite_samples
from dp_clipping.clipping.norms import Norm
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.linear_factors import Grams
from dp_clipping.layers.low_precision_sums import is_rescaled, rescale
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.context import StepContext
from dp_clipping.step.rng_replay import Randomness
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.step_norms import norms_of

Accumulate = Callable[[Parameter, Tensor | None], None]


class PlainBackend:
    """See `private_step.Backend`."""

    fused = False

    def __init__(self, context: StepContext, batch_size: int):
        self.context, self.batch_size = context, batch_size
        self.norms = norms_of(context, batch_size, lambda p: is_rescaled(self.kept.get(p)))
        self.forget()

    def forget(self) -> None:
        self.norms.forget()
        self.kept: dict[Parameter, Any] = {}
        self._grams = Grams()
        self._good: Tensor | None = None  # samples whose norms are finite, if some are not
        self._weights: list[Weights] = []

    # ---- forward --------------------------------------------------------------------------------

    def slots_of(self, private_step: Any, handle: LayerState) -> None:
        """None that differ from other layers'."""

    def will_use(self, parameter: Parameter, x: Tensor, outputs: int) -> None:
        """Nothing is planned."""

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        policy = self.context.policy
        if policy.two_passes:
            return False
        return policy.dense_always or tokens * (outputs + inputs) >= outputs * inputs

    # ---- backward -------------------------------------------------------------------------------

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        self._clip_norms, self._accumulate = clip_norms, accumulate
        self.norms.begin(len(clip_norms))

    @property
    def runs_twice(self) -> bool:
        return self.context.policy.two_passes

    def in_backward(self) -> AbstractContextManager:
        return NOTHING

    def has_taken(self, parameter: Parameter) -> bool:
        return False

    def dense(self, parameter: Parameter, gradients: Tensor, own: Tensor | None = None) -> None:
        with self.context.timer.layers("norm/dense", parameter):
            norm = Norm(squared_norms(gradients))
        self._keep(parameter, norm, gradients)

    def factors(self, parameter: Parameter, factors: Any) -> None:
        with self.context.timer.layers("norm/factors", parameter):
            norm = factors.norm(self._grams)
        self._keep(parameter, norm, factors)

    def _keep(self, parameter: Parameter, norm: Norm, saved: Any) -> None:
        self.norms.found[parameter] = norm
        if not self.context.policy.two_passes:
            self.kept[parameter] = saved
        self.norms.launch()

    # ---- clipping and sums ----------------------------------------------------------------------

    def clip(self) -> BatchNorms:
        squared, bounds = self.norms.squares_and_bounds()
        policy, clip_norms = self.context.policy, self._clip_norms
        scale = coefficients(bounds, clip_norms, policy.clipping_function, policy.gamma)
        # One look from the host: a product with zero would not keep NaN out of the sum.
        good = finite_samples(bounds)
        self._good = None if bool(good.all()) else good.nonzero()[:, 0]
        nonfinite = 0 if self._good is None else self.batch_size - len(self._good)
        if self._good is not None:
            scale = scale[:, self._good]
            for parameter, saved in self.kept.items():
                self.kept[parameter] = self._only_good(saved)
        scale = self._rescaled(scale)
        self._weights = [Weights(*c) for c in zip(scale, scale.tolist(), strict=True)]
        return BatchNorms(squared.sum(0).sqrt(), squared, nonfinite)

    def _rescaled(self, scale: Tensor) -> Tensor:
        """Coefficients that hold for 16-bit factors that are multiplied with them and rounded."""
        split, kept = self.norms.split, self.kept
        if not split.some_are_rescaled(any(is_rescaled(saved) for saved in kept.values())):
            return scale
        counted = split.counted(self.norms.found)
        others = {p for p in counted if not is_rescaled(kept[p])}
        rest = self.norms.table(self._good).only(others)
        groups = self.context.capture.groups
        return rescale(kept, rest, groups, scale, self._clip_norms, counted, split.sum)

    def _only_good(self, saved: Any) -> Any:
        """Without the samples whose norm is not finite."""
        if self._good is None:
            return saved
        return saved[self._good] if isinstance(saved, Tensor) else saved.select(self._good)

    def second_triggers(self, randomness: Randomness) -> list[Tensor]:
        return list(self.context.capture.triggers.values())

    def begin_sums(self) -> None:
        """Nothing leaves before the second backward."""

    def emit(self, parameter: Parameter, saved: Any) -> None:
        self._sum(parameter, self._only_good(saved))

    def end_sums(self) -> None:
        while self.kept:
            parameter = next(iter(self.kept))
            self._sum(parameter, self.kept.pop(parameter))

    @torch.no_grad()
    def _sum(self, parameter: Parameter, saved: Any) -> None:
        weights = self._weights[self.context.capture.groups[parameter]]
        with self.context.timer.layers("sum", parameter):
            if isinstance(saved, Tensor):
                total = weighted_sum(weights, saved)
            else:
                total = saved.weighted_sum(weights)
        self._accumulate(parameter, total)
