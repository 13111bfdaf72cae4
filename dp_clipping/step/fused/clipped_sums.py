"""Forms Σ_i c_i G_i with coefficients that stay on the device, many parameters per launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.clipping.accumulation import Weights
from dp_clipping.distributed.gradient_reduce import ShardedSums
from dp_clipping.kernels.launch.tiles import tile_of
from dp_clipping.kernels.sorted_coefficients import Coefficients
from dp_clipping.kernels.weighted_product import weighted_products
from dp_clipping.kernels.weighted_sum import weighted_sums
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.recorder import Trainable
from dp_clipping.planning.cost_model import SUM_BYTES
from dp_clipping.profiling.timer import Label, Timer
from dp_clipping.step.fused.launch_schedule import LaunchSchedule
from dp_clipping.step.rng_replay import Randomness


def clipped_sums(
    saved: list[tuple[Trainable, Any]],
    scale: Coefficients,
    tile_size: int | None,
    label: Label,
) -> list[tuple[Trainable, Tensor]]:
    """Returns Σ_i c_i G_i of each parameter, [*parameter] in float32, in the order of `saved`.

    Args:
        saved: each parameter, with G [B, *parameter], a linear layer's factors, or an object with
            `weighted_sum` or `gradients`. It is emptied, so that memory is freed as sums are
            formed.
        tile_size: the tile size of the kernels, None: chosen by them.
        label: the range of a profiler's trace for "sum" and the parameters it is of.
    """
    parameters, values = zip(*saved, strict=True)
    saved.clear()
    if len(scale.rows) == 1:  # they are all of that group
        rows = [*scale.rows.values()] * len(parameters)
    else:
        rows = [scale.rows[p.group] for p in parameters]
    totals: list[Any] = [None] * len(values)
    linear: list[int] = []
    gradients: dict[int, Tensor] = {}
    for n, one in enumerate(values):
        if isinstance(one, Tensor):
            gradients[n] = one
        elif isinstance(one, LinearFactors):
            if not one.is_one_token:
                linear.append(n)
        elif (kept := getattr(one, "gradients", None)) is not None:
            gradients[n] = kept
    if gradients:
        with label("sum", *[parameters[n] for n in gradients]):
            own = [rows[n] for n in gradients]
            found = weighted_sums(list(gradients.values()), scale.values, own)
        for n, total in zip(gradients, found, strict=True):
            one = values[n]
            totals[n] = total if isinstance(one, Tensor) else one.shaped(total)
    if linear:
        with label("sum", *[parameters[n] for n in linear]):
            pairs = [values[n].operands for n in linear]
            tile = tile_of(tile_size, *{left.dtype for left, _ in pairs})
            found = weighted_products(pairs, scale.sorted, [rows[n] for n in linear], tile)
        for n, total in zip(linear, found, strict=True):
            totals[n] = total
    for n, (parameter, one) in enumerate(zip(parameters, values, strict=True)):
        if totals[n] is None:
            c = scale.values[rows[n]]
            with label("sum", parameter):
                if isinstance(one, LinearFactors):
                    totals[n] = one.only(c > 0).weighted_sum(Weights(c, []))
                else:
                    totals[n] = one.weighted_sum(c, parameter.shape[0])
    return list(zip(parameters, totals, strict=True))


class FusedSums:
    """Keeps the operands of one backward's sums, and forms the sums with few launches.

    Args:
        capture: the parameters.
        shards: takes sums to their shards; None: the network is not sharded.
        timer: the timer of the step.
        tile_size: the tile size of the kernels, None: chosen by them.
        schedule: when queued work is launched.
        noted: the versions of what is kept, a `capture.checks.kept.Kept`.
        compiled: operands arrive in another order than activations are freed, those of linear
            layers last.

    Attributes:
        kept: parameter -> its operands, until coefficients are known, in order of arrival.
        recomputed: parameters whose operands a second backward computes again.
        scale: coefficients of all groups, when they are known.
        accumulate: takes the sums.
        is_in_backward: whether a backward runs, which has sync points.
    """

    scale: Coefficients
    accumulate: Callable[[Trainable, Tensor], None]

    def __init__(
        self,
        capture: CapturedNetwork,
        shards: ShardedSums | None,
        timer: Timer,
        tile_size: int | None,
        schedule: LaunchSchedule,
        noted: Any,
        compiled: bool = False,
    ):
        self.capture, self.shards, self.schedule = capture, shards, schedule
        self.compiled, self._noted = compiled, noted
        self._how = tile_size, timer.layers
        self.kept: dict[Trainable, Any] = {}
        self.recomputed: list[Trainable] = []
        self.is_in_backward = False
        self._taken: set[Trainable] = set()  # before and while a second backward runs
        self._queued: list[tuple[Trainable, Any]] = []

    def __len__(self) -> int:
        """Returns how many parameters wait for a launch."""
        return len(self._queued)

    def begin(self) -> None:
        self.schedule.begin()
        self._taken = set(self.kept)
        if self.capture.sharding is not None:
            self.end()  # beside what the second backward brings of the same modules
            self.schedule.reset_sync_point()

    def second_triggers(self, randomness: Randomness) -> list[Tensor]:
        """Returns triggers as deep as needed, and all if the first backward drew random numbers.

        Ranks of a sharded model draw the same numbers, so they agree on what they gather.
        """
        everything = self.recomputed and randomness.has_moved
        return [p.trigger for p in (self.capture.trained if everything else self.recomputed)]

    def has_taken(self, parameter: Trainable) -> bool:
        return parameter in self._taken

    def emit(self, parameter: Trainable, saved: Any) -> None:
        self.schedule.check_stream(saved if isinstance(saved, Tensor) else saved.y)
        if not isinstance(saved, Tensor | LinearFactors):
            saved = saved.on_kernels()
            self._noted.note_all({parameter: saved})
        self._taken.add(parameter)
        self._queue(parameter, saved)

    def end(self) -> None:
        left = [*self.kept.items()]
        self.kept.clear()
        if self.compiled and self.shards is None:  # a sum that takes more than it frees is late
            left.sort(key=lambda item: self.bytes_of(item[0]) > item[1].nbytes)
        left.reverse()
        while left:  # what a sum is formed of is freed with it
            self._queue(*left.pop())
        self._flush()

    def launch_ready(self) -> None:
        """Sends the sums that have been formed, at a sync point."""
        self.schedule.reset_sync_point()
        if self.shards is not None:
            self.shards.launch_ready()

    def bytes_of(self, parameter: Trainable) -> int:
        """Returns the bytes that forming its sum takes temporarily.

        It is 0 where sums of a sharded model are deferred to the next sync point: memory is no
        reason to form them early then.
        """
        if self.shards is not None and self.shards.deferred:
            return 0
        return SUM_BYTES * parameter.shape.numel()

    def _queue(self, parameter: Trainable, saved: Any) -> None:
        """Queues a parameter's sum for a common launch."""
        self._queued.append((parameter, saved))
        if not self.schedule.add(self.bytes_of(parameter) + saved.nbytes):
            return
        if self.schedule.is_sync_point(parameter) and self.is_in_backward:
            self._flush()
            self.launch_ready()
        elif self.schedule.is_crowded():
            self._flush()

    def _flush(self) -> None:
        """Forms the sums that are queued."""
        self.schedule.launched()
        queued, self._queued = self._queued, []
        if queued:
            self.form(queued, self.scale)

    @torch.no_grad()
    def form(self, saved: list[tuple[Trainable, Any]], scale: Coefficients) -> None:
        """Forms sums of several parameters; `saved` is emptied."""
        self._noted.check(saved)
        totals = clipped_sums(saved, scale, *self._how)
        totals.reverse()
        while totals:
            self.accumulate(*totals.pop())
