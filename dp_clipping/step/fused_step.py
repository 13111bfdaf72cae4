"""A private step on the fused kernels: nothing in it waits for the device.

The private step of the `flash` modes where their kernels run. Layers hand over what they do in any
private step. Here a plan says what becomes of a linear layer's factors, coefficients stay on the
device, and samples whose norm is not finite are left out by kernels that do not load them.

Launches are shared: what layers hand over waits until there is enough of it, and one launch serves
many of them. Under `per_layer` clipping with one backward their sums are formed right after: no
more is stored than waits for a launch, and there is no second phase. So a sample is left out of all
groups if its loss is not finite, else from the first chunk on in which a norm is not: groups nearer
the output have left by then, each with at most its threshold.
"""

from collections import Counter
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.compile_forecast import refuse_repeated
from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.clipping.coefficients import MARGIN, coefficients, finite_samples
from dp_clipping.clipping.norms import Norm, on_device
from dp_clipping.distributed.dtensor import local
from dp_clipping.kernels.coefficients import clip_coefficients
from dp_clipping.kernels.norm_layer_gradients import Normalized
from dp_clipping.kernels.squared_norms import squared_norms
from dp_clipping.kernels.tiles import stream_on
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.planning.calibration import rates_of
from dp_clipping.planning.cost_model import GRADIENT, SUM_BYTES, LayerPlan, LinearShape
from dp_clipping.planning.plan import Plan
from dp_clipping.step.clipped_sums import Coefficients, clipped_sums
from dp_clipping.step.launch_schedule import LaunchSchedule
from dp_clipping.step.norm_queue import NormQueue
from dp_clipping.step.private_step import PrivateStep

MEMORY_FRACTION = (
    0.93  # of an ordinary step's memory: the rest is for what backward holds in passing
)


class FusedStep(PrivateStep):
    """See `PrivateStep`."""

    fused = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.launch_schedule = LaunchSchedule(self.capture.sharding, self.trigger.device)

    def _forget(self) -> None:
        super()._forget()
        forecast = self.forecast
        self._uses = {} if forecast is None else forecast.of_batch(self.batch_size)
        self._counts: dict[Parameter, Tensor] = {}  # of uses in compiled code
        self._waiting = NormQueue(self.capture.norm_group_key, self.policy.tile_size)
        self._to_sum: dict[Parameter, Any] = {}
        self._bad: Tensor | None = None  # [B] bool, samples that had a norm that is not finite
        self._streams = False  # whether groups are summed as soon as their norms are there
        self._handed_on: set[Parameter] = set()
        self._stream: int | None = None
        self._joined: set[Parameter] = set()  # their norms are in another parameter's

    # ---- what layers ask in forward -------------------------------------------------------------

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        return False

    def slots_of(self, handle: LayerState) -> dict[str, Tensor]:
        forecast = self.forecast
        parameter = handle.parameters().get("weight")
        if forecast is None or parameter not in forecast.uses:
            return super().slots_of(handle)
        choice = self._plan_ahead[self.capture.names[parameter]]
        slots = forecast.slots(self, handle, choice.algorithm)
        if "bias" in handle.trainable:
            slots["bias"] = self.slot(handle.parameter("bias"))
        return slots

    @cached_property
    def _plan_ahead(self) -> Plan:
        return self._plan_of(list(self._uses.values()))

    def will_use(self, parameter: Parameter, x: Tensor, outputs: int) -> None:
        if parameter in self._uses:  # foreseen
            return
        inputs = x.shape[-1]
        tokens = x.numel() // max(1, inputs * self.batch_size)
        self._uses[parameter] = LinearShape(
            self.capture.names[parameter], self.batch_size, tokens, inputs, outputs,
            x.element_size(), stored_dtype(x.dtype).itemsize,
        )  # fmt: skip

    # ---- what layers hand over in backward ------------------------------------------------------

    def counted(self, parameter: Parameter, count: Tensor) -> None:
        """How often compiled code has used a weight [1]; what it hands over comes next."""
        self._counts[parameter] = count

    def dense(self, parameter: Parameter, gradients: Tensor, own: Tensor | None = None) -> None:
        """As in any private step; `own`: squared norms that came with G."""
        if self._is_second_visit(parameter):
            return
        self._arrived(parameter)
        self._check_stream(gradients)
        if self._summing:
            self._emit(parameter, gradients)
            return
        if self.policy.two_passes and gradients.dim() > 2:
            self._recomputed.append(parameter)
        else:
            self._kept[parameter] = gradients
        if own is None and gradients.dim() == 2:
            self._waiting.vectors[parameter] = gradients
            self._wait_for(parameter, 0)
            return
        with self._range("norm/dense", parameter):
            self._norms[parameter] = Norm(squared_norms(gradients) if own is None else own)
        self._wait_for(parameter, gradients.nbytes if self._streams else 0)

    def factors(self, parameter: Parameter, factors: Any) -> None:
        if self._is_second_visit(parameter):
            return
        self._arrived(parameter)
        self._check_stream(factors.y)
        is_linear = isinstance(factors, LinearFactors)
        if self._summing:
            self._emit(parameter, factors if is_linear else factors.on_kernels())
        elif is_linear:
            choice = self._choice_of(parameter, factors)
            self._waiting.linear[parameter] = factors, choice
            if choice.recomputed:
                self._recomputed.append(parameter)
            else:
                self._kept[parameter] = factors  # in order of arrival; G may take its place
            stays = not choice.recomputed and choice.algorithm != GRADIENT and not self._streams
            total = self._sum_bytes(parameter) if self._streams else 0
            self._wait_for(parameter, 0 if stays else max(factors.bytes, choice.bytes) + total)
        else:
            self._take_norm(parameter, factors.on_kernels())

    def _take_norm(self, parameter: Parameter, use: Any) -> None:
        """Of an embedding or a convolution, whose norm is one launch."""
        keep = not (self.policy.two_passes and use.may_be_recomputed)
        with self._range("norm/factors", parameter):
            self._norms[parameter] = Norm(use.take_norm(keep))
        if keep:
            self._kept[parameter] = use
        else:
            self._recomputed.append(parameter)
        self._wait_for(parameter, use.nbytes if self._streams else 0)

    def normalized(self, weight: Parameter | None, bias: Parameter | None, use: Normalized) -> None:
        """What a normalisation's only use has left; None: that parameter is frozen."""
        own = [p for p in (weight, bias) if p is not None]
        if self._is_second_visit(own[0]):
            return
        for parameter in own:
            self._arrived(parameter)
        self._check_stream(use.y)
        self._waiting.add_normalized(weight, bias, use)
        self._kept.update(dict.fromkeys(own, use))  # until G takes its place
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

    def _is_second_visit(self, parameter: Parameter) -> bool:
        """A second backward may come by layers whose remains were kept."""
        return self._summing and (parameter in self._kept or parameter in self._handed_on)

    def _choice_of(self, parameter: Parameter, factors: LinearFactors) -> LayerPlan:
        if parameter not in self._uses:  # its forward was not seen
            left, right = factors.operands
            self.will_use(parameter, right, left.shape[-1])
            return self._plan_of([self._uses[parameter]])[self.capture.names[parameter]]
        return self.plan[self.capture.names[parameter]]

    def _wait_for(self, parameter: Parameter, size: int) -> None:
        """Launch what waits if there is enough of it, or if what comes of it may leave now."""
        self.launch_schedule.add(size)
        leaves = self._streams or self._partial is not None
        if self.launch_schedule.is_sync_point(parameter) and leaves:
            self._take_norms(everything=True)
            self._note_norms()
            if self._streams:
                self._clip_complete_groups()
            self._let_go()
        elif self.launch_schedule.is_crowded():
            alone = not self.split_norms.is_split  # else coefficients take a collective
            self._take_norms(everything=leaves and alone)
            if self._streams and alone:
                self._clip_complete_groups()

    def _let_go(self) -> None:
        """At a meeting: sums that have been formed leave."""
        self.launch_schedule.reset_sync_point()
        if self.context.sums is not None:
            self.context.sums.launch_ready()

    # ---- the step -------------------------------------------------------------------------------

    def _prepare(self, losses: Tensor) -> None:
        self.plan = self._plan_of(list(self._uses.values()))
        self.context.plans.last = self.plan
        self.launch_schedule.begin_backward()
        self._streams = self.policy.per_layer and not self._needs_second_pass()
        self._bad = torch.zeros(self.batch_size, dtype=torch.bool, device=losses.device)
        if self._streams and len(losses) == self.batch_size:  # not for a row without a sample
            self._bad |= ~losses.detach().isfinite()

    def _plan_of(self, uses: list[LinearShape]) -> Plan:
        key = tuple(uses)
        plans = self.context.plans.known
        if key not in plans:
            plans[key] = Plan(
                uses, rates_of(self.trigger.device), self._budget(), self.policy.norm_algorithm,
                may_recompute=self.policy.may_run_twice,
            )  # fmt: skip
        return plans[key]

    def _budget(self) -> int | None:
        """Bytes that may be kept: what was asked for, or what an ordinary step would hold too.

        That is what the forward has saved, which backward frees as it goes, or the gradients that
        it would leave, whichever is more.
        """
        if self.policy.per_layer and not self.policy.two_passes:
            return None  # no more is kept than waits for a launch
        if self.policy.memory_budget is not None:
            return self.policy.memory_budget
        if self.policy.two_passes:
            return 0
        forecast = self.forecast
        if forecast is None:
            held = self.launch_schedule.saved
        else:
            held = forecast.held * forecast.planned(self.batch_size)
        gradients = sum(local(p).nbytes for p in self.capture.parameters)
        return int(MEMORY_FRACTION * max(held, gradients))

    def _needs_second_pass(self) -> bool:
        return self.policy.two_passes or not self.plan.is_one_pass

    def _second_triggers(self) -> list[Tensor]:
        """Only as deep as it must, and everywhere if the first one drew random numbers.

        On the ranks of a sharded model the network draws alike, so they agree on what they gather.
        """
        if self._recomputed and self._randomness.has_moved:
            return super()._second_triggers()
        return [self.capture.triggers[parameter] for parameter in self._recomputed]

    def _take_norms(self, everything: bool) -> None:
        found = self._waiting.flush(everything, self._range)
        self._norms.update(found.norms)
        self._joined |= found.joined
        self._kept.update(found.gradients)  # in the factors' places
        self.launch_schedule.launched()

    def _known_norms(self) -> list[Parameter]:
        return [*self._norms, *self._joined]

    def _clip(self, clip_norms: Tensor) -> Tensor:
        self._take_norms(everything=True)
        self._note_norms()
        everything = list(range(len(clip_norms)))
        if self.split_norms.is_split:
            refuse_repeated(self._norms, self._counts, self.capture.parameters)
            self.squares, bounds = self._squares_and_bounds()
            if self._kept or self._recomputed:
                self._scale = self._coefficients_of(bounds, everything)
        else:
            if self._kept or self._recomputed:
                self._scale = self._coefficients(everything)
            self.squares = self._table(len(clip_norms)).squared()
        self.nonfinite = self._bad.sum()
        return self.squares.sum(0).sqrt()

    def _coefficients_of(self, bounds: Tensor, groups: list[int]) -> Coefficients:
        """From upper bounds [K, B] of whole samples' squared norms: see `_coefficients`."""
        clip_norms, policy = self._clip_norms_of(groups), self.policy
        self._bad |= ~finite_samples(bounds)
        values = coefficients(bounds, clip_norms, policy.clipping_function, policy.gamma)
        values = values.masked_fill(self._bad, 0).float()
        return Coefficients(values, {group: row for row, group in enumerate(groups)})

    def _clip_norms_of(self, groups: list[int]) -> Tensor:
        clip_norms = self._clip_norms
        if len(groups) == len(clip_norms):
            return clip_norms
        return clip_norms[on_device(tuple(groups), torch.int64, clip_norms.device)]

    def _coefficients(self, groups: list[int]) -> Coefficients:
        """Of these groups, 0 for samples that have not had finite norms so far."""
        members = self.capture.members
        own = [p for k in groups for p in members[k]]
        refuse_repeated(self._norms, self._counts, own)
        clip_norms = self._clip_norms_of(groups)
        if self.split_norms.is_split:
            with self._phase("norm_all_reduce"):
                table = self._table_of(own)[:, groups]
                _, bounds = self.split_norms.unpack(self.reducer.reduce(table).wait())
                return self._coefficients_of(bounds, groups)
        mine = [[self._norms[p] for p in members[k] if p in self._norms] for k in groups]
        norms = [norm for own in mine for norm in own] or [Norm(self._zero())]
        squares = torch.stack([norm.squared for norm in norms])
        scales = squares  # if no norm has errors, they are multiplied with 0
        if any(norm.scale is not None for norm in norms):
            zero = self._zero()
            scales = torch.stack([zero if n.scale is None else n.scale for n in norms])
        errors = tuple((norm.gram_error, norm.sum_error) for norm in norms)
        starts = tuple(accumulate((len(own) for own in mine), initial=0))
        device, policy = squares.device, self.policy
        values = clip_coefficients(
            squares, scales, on_device(errors, torch.float32, device),
            on_device(starts, torch.int32, device), clip_norms, 1 + MARGIN[torch.float32],
            policy.gamma if policy.clipping_function == "automatic" else None, self._bad,
        )  # fmt: skip
        return Coefficients(values, {group: row for row, group in enumerate(groups)})

    def _clip_complete_groups(self) -> None:
        """Sum the clipping groups all of whose norms are there: nothing else depends on them."""
        here = [p for p in self._kept if p in self._norms or p in self._joined]
        counts = Counter(self.capture.groups[p] for p in here)
        groups = [k for k, count in counts.items() if count == len(self.capture.members[k])]
        if not groups:
            return
        scale = self._coefficients(groups)
        mine = {p: self._kept.pop(p) for p in here if self.capture.groups[p] in scale.rows}
        self._handed_on.update(mine)
        self._sum_all(mine, scale)

    def _run_backward(self, losses: Tensor, triggers: list[Tensor], retain_graph: bool) -> None:
        """Sums leave at meetings only, and in the end."""
        sums = self.context.sums
        if sums is not None:
            sums.deferred = True
        super()._run_backward(losses, triggers, retain_graph)
        if sums is not None:
            sums.deferred = False
            sums.launch_ready()

    def _sum(self, losses: Tensor) -> None:
        self.launch_schedule.begin()
        if self.capture.sharding is not None:
            self._summing = True
            self._hand_on_kept()  # beside what the second backward brings of the same modules
            self._sum_waiting()
            self.launch_schedule.reset_sync_point()
        super()._sum(losses)
        self._sum_waiting()

    def _emit(self, parameter: Parameter, saved: Any) -> None:
        self._to_sum[parameter] = saved
        self._handed_on.add(parameter)
        held = getattr(saved, "nbytes", 0) or getattr(saved, "bytes", 0)
        self.launch_schedule.add(self._sum_bytes(parameter) + held)
        if self.launch_schedule.is_sync_point(parameter) and self._in_backward:
            self._sum_waiting()
            self._let_go()
        elif self.launch_schedule.is_crowded():
            self._sum_waiting()

    def _sum_bytes(self, parameter: Parameter) -> int:
        """What forming its sum takes for a moment. In a backward, sums of a sharded model stay
        until ranks meet, whenever they are formed: then it is no reason to form them early."""
        sums = self.context.sums
        if sums is not None and sums.deferred:
            return 0
        return SUM_BYTES * self.capture.shapes[parameter].numel()

    def _sum_waiting(self) -> None:
        waiting, self._to_sum = self._to_sum, {}
        self.launch_schedule.launched()
        if waiting:
            self._sum_all(waiting, self._scale)

    @torch.no_grad()
    def _sum_all(self, saved: dict[Parameter, Any], scale: Coefficients) -> None:
        """Σ_i c_i G_i of several parameters."""
        capture = self.capture
        totals = clipped_sums(
            saved, scale, capture.groups, capture.shapes, self.policy.tile_size, self._range
        )
        for parameter in list(totals):
            self._accumulate(parameter, totals.pop(parameter))
