"""A private step on the fused kernels: nothing in it waits for the device.

The backend of the `flash` modes where their kernels run. Layers hand over what they do in any
private step. Here a plan says what becomes of a linear layer's factors, coefficients stay on the
device, and samples whose norm is not finite are left out by kernels that do not load them.

Launches are shared: what layers hand over waits until there is enough of it, and one launch serves
many of them. Under `per_layer` clipping with one backward their sums are formed right after: no
more is stored than waits for a launch, and there is no second phase. So a sample is left out of all
groups if its loss is not finite, else from the first chunk on in which a norm is not: groups nearer
the output have left by then, each with at most its threshold.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.compile_forecast import CompiledShapes, refuse_repeated
from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.launch.tiles import stream_on
from dp_clipping.kernels.norm_layer_gradients import Normalized
from dp_clipping.kernels.sorted_coefficients import Coefficients
from dp_clipping.kernels.squared_norms import squared_norms
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.planning.calibration import rates_of
from dp_clipping.planning.cost_model import GRADIENT, SUM_BYTES
from dp_clipping.step.context import StepContext
from dp_clipping.step.fused.clipped_sums import SumQueue
from dp_clipping.step.fused.coefficients import FusedCoefficients
from dp_clipping.step.fused.launch_schedule import LaunchSchedule
from dp_clipping.step.fused.layer_plans import LayerPlans
from dp_clipping.step.fused.norm_queue import NormQueue
from dp_clipping.step.rng_replay import Randomness
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.step_norms import norms_of

Accumulate = Callable[[Parameter, Tensor | None], None]


class FusedBackend:
    """See `private_step.Backend`, whose eighteen methods it has.

    It only decides when something is launched. What waits for a launch is in `queue` and `sums`,
    what a linear layer is to do in `plans`, what was found in `norms` and `coefficients`.

    Args:
        context: what all steps of the model have in common.
        batch_size: samples of the batch.
        forecast: of what linear layers are given, where compiled code needs it.
    """

    fused = True

    def __init__(
        self, context: StepContext, batch_size: int, forecast: CompiledShapes | None = None
    ):
        self.context, self.batch_size, self.forecast = context, batch_size, forecast
        self.norms = norms_of(context, batch_size)
        self.schedule = LaunchSchedule(context.sharding, context.capture.trigger.device)
        self.forget()

    def forget(self) -> None:
        context, capture, tile_size = self.context, self.context.capture, self.tile_size
        self.norms.forget()
        self.plans = LayerPlans(
            capture.names, capture.parameters, context.policy, context.plans.known,
            self.batch_size, self.forecast, lambda: rates_of(capture.trigger.device),
            lambda: self.schedule.saved,
        )  # fmt: skip
        self.queue = NormQueue(capture.norm_group_key, tile_size)
        self.sums = SumQueue(capture.groups, capture.shapes, tile_size, context.timer.layers)
        self.is_in_backward = False
        self._recomputed: list[Parameter] = []
        self._counts: dict[Parameter, Tensor] = {}  # of uses in compiled code
        self._streams = False  # whether groups are summed as soon as their norms are there
        self._stream: int | None = None

    @property
    def tile_size(self) -> int | None:
        return self.context.policy.tile_size

    # ---- forward --------------------------------------------------------------------------------

    def slots_of(self, private_step: Any, handle: LayerState) -> dict[str, Tensor] | None:
        forecast = self.forecast
        parameter = handle.parameters().get("weight")
        if forecast is None or parameter not in forecast.uses:
            return None
        choice = self.plans.ahead[self.context.capture.names[parameter]]
        slots = forecast.slots(private_step, handle, choice.algorithm)
        if "bias" in handle.trainable:
            slots["bias"] = private_step.slot(handle.parameter("bias"))
        return slots

    def will_use(self, parameter: Parameter, x: Tensor, outputs: int) -> None:
        self.plans.will_use(parameter, x, outputs)

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        return False

    # ---- backward -------------------------------------------------------------------------------

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        capture, policy = self.context.capture, self.context.policy
        self.context.plans.last = self.plans.make()
        self.schedule.begin_backward()
        self._streams = policy.per_layer and not self.runs_twice
        left_out = torch.zeros(self.batch_size, dtype=torch.bool, device=losses.device)
        if self._streams and len(losses) == self.batch_size:  # not for a row without a sample
            left_out |= ~losses.detach().isfinite()
        self.sums.accumulate = accumulate
        self.norms.begin(len(clip_norms))
        self.coefficients = FusedCoefficients(clip_norms, capture.members, policy, left_out)

    @property
    def runs_twice(self) -> bool:
        return self.context.policy.two_passes or not self.plans.plan.is_one_pass

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Sums leave at sync points only, and in the end."""
        sums = self.context.sums
        self.is_in_backward = True
        if sums is not None:
            sums.deferred = True
        yield
        self.is_in_backward = False
        if sums is not None:
            sums.deferred = False
            sums.launch_ready()

    def counted(self, parameter: Parameter, count: Tensor) -> None:
        self._counts[parameter] = count

    def dense(self, parameter: Parameter, gradients: Tensor, own: Tensor | None = None) -> None:
        self._check_stream(gradients)
        if self.context.policy.two_passes and gradients.dim() > 2:
            self._recomputed.append(parameter)
        else:
            self.sums.kept[parameter] = gradients
        if own is None and gradients.dim() == 2:
            self.queue.vectors[parameter] = gradients
            self._wait_for(parameter, 0)
            return
        with self.context.timer.layers("norm/dense", parameter):
            self.norms.found[parameter] = Norm(squared_norms(gradients) if own is None else own)
        self._wait_for(parameter, gradients.nbytes if self._streams else 0)

    def factors(self, parameter: Parameter, factors: Any) -> None:
        self._check_stream(factors.y)
        if not isinstance(factors, LinearFactors):
            self._take_norm(parameter, factors.on_kernels())
            return
        choice = self.plans.choice_of(parameter, factors)
        self.queue.linear[parameter] = factors, choice
        if choice.recomputed:
            self._recomputed.append(parameter)
        else:
            self.sums.kept[parameter] = factors  # in order of arrival; G may take its place
        stays = not choice.recomputed and choice.algorithm != GRADIENT and not self._streams
        total = self._sum_bytes(parameter) if self._streams else 0
        self._wait_for(parameter, 0 if stays else max(factors.bytes, choice.bytes) + total)

    def _take_norm(self, parameter: Parameter, use: Any) -> None:
        """Takes the norm of an embedding or a convolution, which is one launch."""
        keep = not (self.context.policy.two_passes and use.may_be_recomputed)
        with self.context.timer.layers("norm/factors", parameter):
            self.norms.found[parameter] = Norm(use.take_norm(keep))
        if keep:
            self.sums.kept[parameter] = use
        else:
            self._recomputed.append(parameter)
        self._wait_for(parameter, use.nbytes if self._streams else 0)

    def normalized(self, weight: Parameter | None, bias: Parameter | None, use: Normalized) -> None:
        own = [p for p in (weight, bias) if p is not None]
        self._check_stream(use.y)
        self.queue.add_normalized(weight, bias, use)
        self.sums.kept.update(dict.fromkeys(own, use))  # until G takes its place
        self._wait_for(own[0], use.nbytes)
        for parameter in own[1:]:
            self._wait_for(parameter, 0)

    def _check_stream(self, x: Tensor) -> None:
        """Launches are shared, so what they read must have been computed on one stream."""
        if x.is_cuda:
            stream = stream_on(x.device)
            if self._stream is None:
                self._stream = stream
            elif self._stream != stream:
                raise RuntimeError(
                    "layers of one backward ran on several CUDA streams, which the flash modes "
                    "cannot take: run the forward on one stream, or use bookkeeping or ghost"
                )

    def has_taken(self, parameter: Parameter) -> bool:
        """A second backward may come by layers whose remains were kept."""
        return parameter in self.sums.kept or parameter in self.sums.taken

    def _wait_for(self, parameter: Parameter, size: int) -> None:
        """Launch what waits if there is enough of it, or if what comes of it may leave now."""
        self.schedule.add(size)
        leaves = self._streams or self.norms.leave_early
        if self.schedule.is_sync_point(parameter) and leaves:
            self._take_norms(everything=True)
            self.norms.launch()
            if self._streams:
                self._clip_complete_groups()
            self._launch_ready()
        elif self.schedule.is_crowded():
            alone = not self.norms.split.is_split  # else coefficients take a collective
            self._take_norms(everything=leaves and alone)
            if self._streams and alone:
                self._clip_complete_groups()

    def _launch_ready(self) -> None:
        """At a sync point: sums that have been formed leave."""
        self.schedule.reset_sync_point()
        if self.context.sums is not None:
            self.context.sums.launch_ready()

    # ---- norms and coefficients -----------------------------------------------------------------

    def _take_norms(self, everything: bool) -> None:
        found = self.queue.flush(everything, self.context.timer.layers)
        self.norms.found.update(found.norms)
        self.norms.joined |= found.joined
        self.sums.kept.update(found.gradients)  # in the factors' places
        self.schedule.launched()

    def clip(self) -> BatchNorms:
        self._take_norms(everything=True)
        self.norms.launch()
        capture = self.context.capture
        everything = list(range(len(capture.members)))
        needed = bool(self.sums.kept or self._recomputed)
        if self.norms.split.is_split:
            refuse_repeated(self.norms.found, self._counts, capture.parameters)
            squared, bounds = self.norms.squares_and_bounds()
            if needed:
                self.sums.scale = self.coefficients.of_bounds(bounds, everything)
        else:
            if needed:
                self.sums.scale = self._coefficients_of(everything)
            squared = self.norms.table().squared()
        return BatchNorms(squared.sum(0).sqrt(), squared, self.coefficients.left_out.sum())

    def _coefficients_of(self, groups: list[int]) -> Coefficients:
        own = [p for k in groups for p in self.context.capture.members[k]]
        refuse_repeated(self.norms.found, self._counts, own)
        if self.norms.split.is_split:
            _, bounds = self.norms.exchange(own, groups)
            return self.coefficients.of_bounds(bounds, groups)
        return self.coefficients.of(groups, self.norms.found, self.norms.zero)

    def _clip_complete_groups(self) -> None:
        """Sum the clipping groups all of whose norms are there: nothing else depends on them."""
        kept = self.sums.kept
        group_of, members = self.context.capture.groups, self.context.capture.members
        here = [p for p in kept if p in self.norms.found or p in self.norms.joined]
        counts = Counter(group_of[p] for p in here)
        groups = [k for k, count in counts.items() if count == len(members[k])]
        if groups:
            scale = self._coefficients_of(groups)
            self.sums.form({p: kept.pop(p) for p in here if group_of[p] in scale.rows}, scale)

    # ---- sums -----------------------------------------------------------------------------------

    def second_triggers(self, randomness: Randomness) -> list[Tensor]:
        """Only as deep as it must, and everywhere if the first one drew random numbers.

        On the ranks of a sharded model the network draws alike, so they agree on what they gather.
        """
        triggers = self.context.capture.triggers
        if self._recomputed and randomness.has_moved:
            return list(triggers.values())
        return [triggers[parameter] for parameter in self._recomputed]

    def begin_sums(self) -> None:
        self.schedule.begin()
        if self.context.sharding is not None:
            self.end_sums()  # beside what the second backward brings of the same modules
            self.schedule.reset_sync_point()

    def emit(self, parameter: Parameter, saved: Any) -> None:
        self._check_stream(saved if isinstance(saved, Tensor) else saved.y)
        if not isinstance(saved, Tensor | LinearFactors):
            saved = saved.on_kernels()
        self._sum_later(parameter, saved)

    def end_sums(self) -> None:
        kept = self.sums.kept
        while kept:
            parameter = next(iter(kept))
            self._sum_later(parameter, kept.pop(parameter))
        self._sum_waiting()

    def _sum_later(self, parameter: Parameter, saved: Any) -> None:
        self.sums.add(parameter, saved)
        held = getattr(saved, "nbytes", 0) or getattr(saved, "bytes", 0)
        self.schedule.add(self._sum_bytes(parameter) + held)
        if self.schedule.is_sync_point(parameter) and self.is_in_backward:
            self._sum_waiting()
            self._launch_ready()
        elif self.schedule.is_crowded():
            self._sum_waiting()

    def _sum_bytes(self, parameter: Parameter) -> int:
        """What forming its sum takes for a moment. In a backward, sums of a sharded model stay
        until ranks meet, whenever they are formed: then it is no reason to form them early."""
        sums = self.context.sums
        if sums is not None and sums.deferred:
            return 0
        return SUM_BYTES * self.context.capture.shapes[parameter].numel()

    def _sum_waiting(self) -> None:
        self.schedule.launched()
        self.sums.flush()
