"""A private step in plain PyTorch: norms as layers deliver, sums layer by layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.checks.kept import Kept
from dp_clipping.clipping.accumulation import Weights, only, squared_norms, weighted_sum
from dp_clipping.clipping.coefficients import coefficients, finite_samples
from dp_clipping.clipping.norms import Norm
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.linear_factors import Grams
from dp_clipping.layers.low_precision_sums import is_rescaled, rescale
from dp_clipping.layers.recorder import Trainable
from dp_clipping.modes import Policy
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.context import StepContext
from dp_clipping.step.rng_replay import Randomness
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.step_norms import norms_of

Accumulate = Callable[[Trainable, Tensor | None], None]


class PlainPlans:
    """Plans nothing: a linear layer keeps the smaller of G and its factors."""

    def __init__(self, policy: Policy):
        self._policy = policy

    def slots_of(self, private_step: Any, handle: LayerState) -> None:
        """Returns None: a layer in a compiled region has a slot for each parameter."""

    def foresaw_too_much(self) -> bool:
        """Returns False: nothing depends on what a forward saves."""
        return False

    def will_use(self, parameter: Trainable, x: Tensor, outputs: int) -> None:
        """Does nothing."""

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Returns whether G [d, p] is kept rather than its factors."""
        if self._policy.two_passes:
            return False
        return self._policy.dense_always or tokens * (outputs + inputs) >= outputs * inputs


class PlainSums:
    """Forms clipped sums layer by layer.

    Attributes:
        kept: parameter -> G or its factors, in order of arrival.
        accumulate: takes the sums.
    """

    accumulate: Accumulate

    def __init__(self, context: StepContext):
        self.context = context
        self.kept: dict[Trainable, Any] = {}
        self._good: Tensor | None = None  # samples whose norms are finite, if some are not
        self._weights: list[Weights] = []

    def leave_out(self, good: Tensor) -> None:
        """Leaves out the samples that are not `good` [B], whose norms are not finite."""
        self._good = good
        for parameter, saved in self.kept.items():
            self.kept[parameter] = self._only_good(saved)

    def weigh(self, scale: Tensor) -> None:
        """Sets the coefficients [K, B], 0 of samples that are left out."""
        self._weights = [Weights(*c) for c in zip(scale, scale.tolist(), strict=True)]

    def second_triggers(self, randomness: Randomness) -> list[Tensor]:
        return [one.trigger for one in self.context.capture.trained]

    def begin(self) -> None:
        """Forms nothing before the second backward."""

    def has_taken(self, parameter: Trainable) -> bool:
        return False

    def emit(self, parameter: Trainable, saved: Any) -> None:
        self._sum(parameter, self._only_good(saved))

    def end(self) -> None:
        while self.kept:
            parameter = next(iter(self.kept))
            self._sum(parameter, self.kept.pop(parameter))

    def _only_good(self, saved: Any) -> Any:
        """Returns the tensor with zeros for samples that are left out, in the same shape."""
        if self._good is None:
            return saved
        return only(saved, self._good) if isinstance(saved, Tensor) else saved.only(self._good)

    @torch.no_grad()
    def _sum(self, parameter: Trainable, saved: Any) -> None:
        weights = self._weights[parameter.group]
        with self.context.timer.layers("sum", parameter):
            if isinstance(saved, Tensor):
                total = weighted_sum(weights, saved)
            else:
                total = saved.weighted_sum(weights)
        self.accumulate(parameter, total)


class PlainBackend:
    """Computes each norm when a layer delivers; see `private_step.Backend`.

    Args:
        context: what all steps of the model have in common.
        batch_size: samples of the batch.
        padding: [B] bool, True for rows that are padding; None: no row is.
    """

    fused = False

    def __init__(self, context: StepContext, batch_size: int, padding: Tensor | None = None):
        self.context, self.batch_size, self.padding = context, batch_size, padding
        self.plans, self.kept = PlainPlans(context.policy), Kept()
        self.norms = norms_of(context, batch_size, lambda p: is_rescaled(self.sums.kept.get(p)))
        self.forget()

    def forget(self) -> None:
        self.kept.forget()
        self.norms.forget()
        self.sums = PlainSums(self.context)
        self._grams = Grams()

    @property
    def runs_twice(self) -> bool:
        return self.context.policy.two_passes

    # ---- backward -------------------------------------------------------------------------------

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        self._clip_norms, self.sums.accumulate = clip_norms, accumulate
        self.norms.begin(len(clip_norms))

    def in_backward(self) -> AbstractContextManager:
        return NOTHING

    def dense(self, parameter: Trainable, gradients: Tensor, own: Tensor | None = None) -> None:
        with self.context.timer.layers("norm/dense", parameter):
            norm = Norm(squared_norms(gradients))
        self._keep(parameter, norm, gradients)

    def factors(self, parameter: Trainable, factors: Any) -> None:
        with self.context.timer.layers("norm/factors", parameter):
            norm = factors.norm(self._grams)
        self._keep(parameter, norm, factors)

    def _keep(self, parameter: Trainable, norm: Norm, saved: Any) -> None:
        self.norms.found[parameter] = norm
        if not self.context.policy.two_passes:
            self.sums.kept[parameter] = saved
        self.norms.launch()

    # ---- clipping -------------------------------------------------------------------------------

    def clip(self) -> BatchNorms:
        self.kept.check(self.sums.kept.items())
        squared, bounds = self.norms.squares_and_bounds()
        policy, clip_norms = self.context.policy, self._clip_norms
        scale = coefficients(bounds, clip_norms, policy.clipping_function, policy.gamma)
        # One look from the host: a product with zero would not keep NaN out of the sum.
        finite, good, nonfinite = finite_samples(bounds), None, 0
        if not bool(finite.all()):
            good = finite
            self.sums.leave_out(good)
            nonfinite = int((~good).sum())
        if self.padding is not None:  # values that are not left out are finite, and c is 0
            scale = scale.masked_fill(self.padding, 0.0)
            nonfinite = nonfinite and int((~finite & ~self.padding).sum())
        self.sums.weigh(self._rescaled(scale, good))
        return BatchNorms(squared.sum(0).sqrt(), squared, nonfinite)

    def _rescaled(self, scale: Tensor, good: Tensor | None) -> Tensor:
        """Returns coefficients for 16-bit factors, corrected for the rounding of scaled factors."""
        split, kept = self.norms.split, self.sums.kept
        if not split.some_are_rescaled(any(is_rescaled(saved) for saved in kept.values())):
            return scale
        counted = split.counted(self.norms.found)
        others = {p for p in counted if not is_rescaled(kept[p])}
        rest = self.norms.table(good).only(others)
        return rescale(kept, rest, scale, self._clip_norms, counted, split.sum)
