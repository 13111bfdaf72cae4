"""A private step on the fused kernels: nothing in it waits for the device.

The backend of the `flash` modes where their kernels run. A plan says how each linear layer's norm
is taken, coefficients stay on the device, and kernels do not load samples whose norm is not finite.

Launches are shared: operands are queued until one launch serves many layers. Under `per_layer`
clipping with one backward, the sums of these layers are formed right after their norms, so only the
queue is stored. A sample whose loss is not finite is left out of all groups. A sample with a norm
that is not finite is left out from that launch on: the sums of groups nearer the output have been
sent by then, each with at most its threshold.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.checks.kept import Kept
from dp_clipping.capture.compile_forecast import CompiledShapes, refuse_repeated
from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.norm_layer_gradients import Normalized
from dp_clipping.kernels.sorted_coefficients import Coefficients
from dp_clipping.kernels.squared_norms import squared_norms
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.recorder import Trainable
from dp_clipping.planning.calibration import rates_of
from dp_clipping.planning.cost_model import INSTANTIATE
from dp_clipping.step.context import StepContext
from dp_clipping.step.fused.clipped_sums import FusedSums
from dp_clipping.step.fused.coefficients import FusedCoefficients
from dp_clipping.step.fused.launch_schedule import LaunchSchedule
from dp_clipping.step.fused.layer_plans import LayerPlans
from dp_clipping.step.fused.norm_queue import NormQueue
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.step_norms import norms_of

Accumulate = Callable[[Trainable, Tensor | None], None]


class FusedBackend:
    """Decides when norms and coefficients are launched; see `private_step.Backend`.

    `queue` and `sums` hold operands that wait for a launch, `plans` the algorithm of each linear
    layer, `norms` and `coefficients` the results.

    Args:
        context: what all steps of the model have in common.
        batch_size: samples of the batch.
        padding: [B] bool, True for rows that are padding; None: no row is.
        forecast: expected shapes of linear layers, where compiled code needs them.
    """

    fused = True

    def __init__(
        self, context: StepContext, batch_size: int, padding: Tensor | None = None,
        forecast: CompiledShapes | None = None,
    ):  # fmt: skip
        self.context, self.batch_size, self.padding = context, batch_size, padding
        capture, device = context.capture, context.capture.trigger.device
        self.norms, self._compiled = norms_of(context, batch_size), forecast is not None
        self.kept = Kept()
        self.schedule = schedule = LaunchSchedule(context.sharding, device)
        self.plans = LayerPlans(
            capture.trained, context.policy, context.plans,
            batch_size, forecast, lambda: rates_of(device), lambda: schedule.saved,
        )  # fmt: skip
        self.forget()

    def forget(self) -> None:
        context, tile_size = self.context, self.context.policy.tile_size
        self.norms.forget()
        self.kept.forget()
        self.queue = NormQueue(tile_size)
        self.sums = FusedSums(
            context.capture, context.sums, context.timer, tile_size, self.schedule, self.kept,
            compiled=self._compiled,
        )  # fmt: skip
        self._counts: dict[Trainable, Tensor] = {}  # of uses in compiled code
        self._streams = False  # whether groups are summed as soon as their norms are there

    # ---- backward -------------------------------------------------------------------------------

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        capture, policy = self.context.capture, self.context.policy
        self.context.plans.last = self.plans.make()
        self.schedule.begin_backward()
        self._streams = policy.per_layer and not self.runs_twice
        if self.padding is None:
            left_out = torch.zeros(self.batch_size, dtype=torch.bool, device=losses.device)
        else:
            left_out = self.padding.clone()
        if self._streams and len(losses):  # not for a row without a sample
            left_out |= ~losses.detach().isfinite().view(self.batch_size, -1).all(1)
        self.sums.accumulate = accumulate
        self.norms.begin(len(clip_norms))
        self.coefficients = FusedCoefficients(clip_norms, capture.members, policy, left_out)

    @property
    def runs_twice(self) -> bool:
        return self.context.policy.two_passes or not self.plans.plan.is_one_pass

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Surrounds a backward, which sends sums only at sync points and at its end."""
        sums = self.context.sums
        self.sums.is_in_backward = True
        if sums is not None:
            sums.deferred = True
        yield
        self.sums.is_in_backward = False
        if sums is not None:
            sums.deferred = False
            sums.launch_ready()

    def counted(self, parameter: Trainable, count: Tensor) -> None:
        self._counts[parameter] = count

    def dense(self, parameter: Trainable, gradients: Tensor, own: Tensor | None = None) -> None:
        self.schedule.check_stream(gradients)
        if self.context.policy.two_passes and gradients.dim() > 2:
            self.sums.recomputed.append(parameter)
        else:
            self.sums.kept[parameter] = gradients
        if own is None and gradients.dim() == 2:
            self.queue.vectors.append((parameter, gradients))
            self._wait_for(parameter, 0)
            return
        with self.context.timer.layers("norm/dense", parameter):
            self.norms.found[parameter] = Norm(squared_norms(gradients) if own is None else own)
        self._wait_for(parameter, gradients.nbytes if self._streams else 0)

    def factors(self, parameter: Trainable, factors: Any) -> None:
        self.schedule.check_stream(factors.y)
        if not isinstance(factors, LinearFactors):
            self._take_norm(parameter, factors.on_kernels())
            return
        choice = self.plans.choice_of(parameter, factors)
        self.queue.linear.append((parameter, factors, choice))
        if choice.recomputed:
            self.sums.recomputed.append(parameter)
        else:
            self.sums.kept[parameter] = factors  # in order of arrival; G may take its place
        stays = not choice.recomputed and choice.algorithm != INSTANTIATE and not self._streams
        total = self.sums.bytes_of(parameter) if self._streams else 0
        self._wait_for(parameter, 0 if stays else max(factors.nbytes, choice.bytes) + total)

    def _take_norm(self, parameter: Trainable, use: Any) -> None:
        """Takes the norm of an embedding or a convolution, which is one launch."""
        keep = not (self.context.policy.two_passes and use.may_be_recomputed)
        with self.context.timer.layers("norm/factors", parameter):
            self.norms.found[parameter] = use.take_norm(keep)
        self.kept.note_all({parameter: use})
        if keep:
            self.sums.kept[parameter] = use
        else:
            self.sums.recomputed.append(parameter)
        self._wait_for(parameter, use.nbytes if self._streams else 0)

    def normalized(self, weight: Trainable | None, bias: Trainable | None, use: Normalized) -> None:
        own = [p for p in (weight, bias) if p is not None]
        self.schedule.check_stream(use.y)
        self.queue.add_normalized(weight, bias, use)
        self.sums.kept.update(dict.fromkeys(own, use))  # until G takes its place
        self._wait_for(own[0], use.nbytes)
        for parameter in own[1:]:
            self._wait_for(parameter, 0)

    def _wait_for(self, parameter: Trainable, size: int) -> None:
        """Launches the queue if it is long enough, or if its results can be sent now."""
        if not self.schedule.add(size):
            return
        leaves = self._streams or self.norms.leave_early
        if self.schedule.is_sync_point(parameter) and leaves:
            self._take_norms(everything=True)
            self.norms.launch()
            if self._streams:
                self._clip_complete_groups()
            self.sums.launch_ready()
        elif self.schedule.is_crowded():
            alone = not self.norms.split.is_split  # else coefficients take a collective
            self._take_norms(everything=leaves and alone)
            if self._streams and alone:
                self._clip_complete_groups()

    # ---- norms and coefficients -----------------------------------------------------------------

    def _take_norms(self, everything: bool) -> None:
        self.kept.check(self.queue.operands())
        found = self.queue.flush(everything, self.context.timer.layers)
        self.kept.note_all(found.gradients)
        self.norms.found.update(found.norms)
        self.norms.joined |= found.joined
        self.sums.kept.update(found.gradients)  # in the factors' places
        self.schedule.launched()

    def clip(self) -> BatchNorms:
        self._take_norms(everything=True)
        self.norms.launch()
        capture = self.context.capture
        everything = list(range(len(capture.members)))
        needed = bool(self.sums.kept or self.sums.recomputed)
        if self.norms.split.is_split:
            refuse_repeated(self.norms.found, self._counts, capture.trained)
            squared, bounds = self.norms.squares_and_bounds()
            if needed:
                self.sums.scale = self.coefficients.of_bounds(bounds, everything)
        else:
            if needed:
                self.sums.scale = self._coefficients_of(everything)
            squared = self.norms.table().squared()
        left_out = self.coefficients.left_out
        if self.padding is not None:
            left_out = left_out & ~self.padding
        return BatchNorms(squared.sum(0).sqrt(), squared, left_out.sum())

    def _coefficients_of(self, groups: list[int]) -> Coefficients:
        own = [p for k in groups for p in self.context.capture.members[k]]
        refuse_repeated(self.norms.found, self._counts, own)
        if self.norms.split.is_split:
            _, bounds = self.norms.exchange(own, groups)
            return self.coefficients.of_bounds(bounds, groups)
        return self.coefficients.of(groups, self.norms.found, self.norms.zero)

    def _clip_complete_groups(self) -> None:
        """Forms the sums of clipping groups whose norms are all known."""
        kept = self.sums.kept
        members = self.context.capture.members
        here = [p for p in kept if p in self.norms.found or p in self.norms.joined]
        counts = Counter(p.group for p in here)
        groups = [k for k, count in counts.items() if count == len(members[k])]
        if groups:
            scale = self._coefficients_of(groups)
            self.sums.form([(p, kept.pop(p)) for p in here if p.group in scale.rows], scale)
