"""The parts that all steps of one model share, fixed when the model is made.

Nothing in it is replaced later. To run steps of another kind, `verification.check` makes another
context with `dataclasses.replace`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.clipping.accumulation import accumulation_dtype
from dp_clipping.distributed.gradient_reduce import Departures, ShardedSums
from dp_clipping.distributed.norm_reduce import NormReducer
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.modes import Policy
from dp_clipping.planning.plan import Plans
from dp_clipping.profiling.profile import Profile, Timer, profile_of
from dp_clipping.trials.schedule import Schedule


@dataclass(frozen=True)
class StepContext:
    """The parts that steps of one model are built from.

    Attributes:
        capture: the captured layers of the network: parameters, names, groups.
        policy: how the mode works.
        mode: its name, for messages.
        batch_first: the first dimension of the inputs counts the samples, else the second.
        reducer: adds norms up over ranks.
        sums: takes clipped sums to the shards of a sharded network; None: it is not sharded.
        departures: tells the wrapper of sums, if it gathers parameters; None: no wrapper does.
        examples_per_unit: k, the rows of a batch that are clipped together, one unit of privacy.
        views: v; of k rows each v are views of one example, whose loss is the mean of theirs.
        checks: which batches are checked, one of `trials.schedule.LEVELS`.
        profile: the profile of the model's steps; None: the switch is off.
        plans: the plans of linear layers, in steps on fused kernels.
        compared: name of a registered layer -> the schedule of its function's comparisons with
            single samples. `dataclasses.replace` begins new ones.
    """

    capture: CapturedNetwork
    policy: Policy
    mode: str
    batch_first: bool
    reducer: NormReducer
    sums: ShardedSums | None
    departures: Departures | None
    examples_per_unit: int
    views: int
    checks: str
    profile: Profile | None
    plans: Plans = field(default_factory=Plans)
    compared: dict[str, Schedule] = field(default_factory=dict, init=False)

    def schedule_of(self, layer: str) -> Schedule:
        """Returns the schedule of a registered layer's comparisons."""
        return self.compared.setdefault(layer, Schedule(self.checks))

    @cached_property
    def timer(self) -> Timer:
        """Returns the timer of a step's ranges."""
        return Timer(self.profile)

    @cached_property
    def sharding(self) -> Sharding | None:
        return self.capture.sharding

    @cached_property
    def streams(self) -> bool:
        """Returns whether kernels sum a clipping group as soon as its norms are there.

        Norms of parameters that are split over ranks are known when all ranks' are, at the end.
        """
        policy, is_split = self.policy, self.reducer.splits_parameters
        return policy.per_layer and not policy.two_passes and not is_split


def context_of(settings: Any, capture: CapturedNetwork, hide_unprotected: bool) -> StepContext:
    """Returns the context of steps on a captured network, by the model's `Settings`."""
    # That of a data-parallel wrapper around a network that is not sharded.
    data_parallel_group = getattr(settings.module, "process_group", None)
    sharding, tensor_group = capture.sharding, None
    if sharding is not None:
        data_parallel_group, tensor_group = sharding.data_parallel_group, sharding.tensor_group
    widest = max(
        (accumulation_dtype(p.dtype) for p in capture.parameters), key=lambda d: d.itemsize
    )
    reducer = NormReducer(
        data_parallel_group=data_parallel_group, tensor_group=tensor_group,
        mode=settings.norm_reduction, device=capture.trigger.device, dtype=widest,
    )  # fmt: skip
    profile = profile_of(capture.trigger.device, hide_unprotected, reducer.data.size == 1)
    sums = departures = None
    if sharding is not None and sharding.by_wrapper:
        departures = Departures()
    elif sharding is not None:
        sums = ShardedSums(sharding, profile)
    return StepContext(
        capture, settings.policy, settings.grad_sample_mode, settings.batch_first, reducer, sums,
        departures, settings.rows_per_unit * settings.views, settings.views, settings.checks,
        profile,
    )  # fmt: skip
