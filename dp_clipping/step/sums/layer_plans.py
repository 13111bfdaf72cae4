"""Plans how each linear layer of a step is handled, by its uses in forward."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.distributed.dtensor import local
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.recorder import Trainable
from dp_clipping.planning.cost_model import INSTANTIATE, LayerPlan, LinearShape, rates_of
from dp_clipping.planning.plan import Plan
from dp_clipping.step.sums.backward_state import Call, PlainPlans
from dp_clipping.torch_compat import allocated

# Of an ordinary step's memory: the rest is for what backward holds in passing.
MEMORY_FRACTION = 0.93
LEAST_ROUNDED = 1 << 25  # products of a sample: with 64, norm and sum take 0.2 ms in float32


class MeasuredCalls(list[Call]):
    """Uses in a forward, with the bytes that were in use before each.

    Attributes:
        others: of each use of a layer that is not planned, in order: how many planned uses were
            before it, bytes in use once its backward has the gradients of its output and input,
            bytes that its norm takes in passing, and those that are then kept of it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.bytes = device, list[int]()
        self.others: list[tuple[int, int, int, int]] = []

    def append(self, call: Call) -> None:
        self.bytes.append(allocated(self._device))
        super().append(call)

    def add_other(self, x: Tensor, y: Tensor, passing: int, kept: int) -> None:
        """Adds a use, after its forward. The gradient of y is there in place of y."""
        self.others.append((len(self), allocated(self._device) + x.nbytes, passing, kept))


class FusedPlans(PlainPlans):
    """Plans of a step on kernels: an algorithm for each linear layer, by its uses in forward.

    Args:
        context: what all steps of the model have in common, a `context.StepContext`.
        batch_size: samples of the batch.
        forecast: expected shapes of compiled linear layers (`CompiledShapes`); None: not needed.

    Attributes:
        plan: the plan, once it is made; `choices` has it by weight.
    """

    def __init__(self, context: Any, batch_size: int, forecast: Any = None):
        super().__init__()
        self._context, self._policy, self._plans = context, context.policy, context.plans
        self._device = context.capture.trigger.device
        self.at_first = allocated(self._device)
        self._batch_size, self._forecast = batch_size, forecast
        self._uses = {} if forecast is None else dict(forecast.of_batch(batch_size))
        self._shapes = tuple(self._uses.values())  # expected ones
        self.measures = forecast is None and not context.plans.measured.get(batch_size)
        if self.measures:
            self.calls = MeasuredCalls(self._device)
        self.plan: Plan | None = None
        self.choices: dict[Trainable, LayerPlan] = {}

    def _note(self, call: Call) -> None:
        """Adds the tokens of one use to those of its weight."""
        record, shape, dtype, outputs = call
        inputs = shape[-1]
        tokens = shape.numel() // max(1, inputs * self._batch_size)
        if (known := self._uses.get(record)) is not None:
            self._uses[record] = known._replace(tokens=known.tokens + tokens)
            return
        self._uses[record] = LinearShape(
            record.name, self._batch_size, tokens, inputs, outputs, dtype.itemsize,
            stored_dtype(dtype).itemsize, self._is_whole_on_several_ranks(record),
        )  # fmt: skip

    def note_other(self, weight: Trainable, x: Tensor, y: Tensor, passing: int) -> None:
        """Notes y of x, a use of a layer that is not planned: what is kept of it takes memory.

        Args:
            passing: bytes that its norm takes at most, beside what is kept of it.
        """
        if isinstance(self.calls, MeasuredCalls):  # a plain list once backward has begun
            size = self._batch_size * weight.shape.numel() * stored_dtype(x.dtype).itemsize
            both = x.nbytes + y.nbytes
            self.calls.add_other(x, y, min(passing, both), min(size, both))

    def slots_of(self, handle: LayerState) -> Any:
        if self._forecast is None:
            return None
        algorithm_of = lambda name: self.ahead[name].algorithm  # noqa: E731
        return self._forecast.slots(self._batch_size, handle, algorithm_of)

    @property
    def of_slots(self) -> Any:
        return None if self._forecast is None else (self._forecast, self.ahead)

    @cached_property
    def ahead(self) -> Plan:
        """Returns the plan for the expected shapes, before the forward."""
        return self._plan_of(list(self._shapes))

    def foresaw_too_much(self) -> bool:
        # The compiler saves less than an eager forward, because backward computes activations
        # again. How much is known after a forward, and is measured once for each set of shapes.
        saved = self._saved
        if self._forecast is None or not self._batch_size * saved:
            return False
        if self._shapes in self._plans.saved:
            return False
        before = self.ahead
        planned = self._forecast.planned(self._batch_size)
        self._plans.saved[self._shapes] = saved * planned // self._batch_size
        self._plans.known.pop(self._shapes, None)
        return self._plan_of(list(self._shapes)).choices != before.choices

    def make(self) -> None:
        """Makes the plan, once for each set of calls."""
        calls, self.calls = self.calls, []  # a checkpoint runs forward again
        if isinstance(calls, MeasuredCalls):
            self._plans.measured[self._batch_size] = True
        key = (self._batch_size, self._shapes, *calls)
        known = self._plans.of_calls.get(key)
        if known is None:
            foreseen = set(self._uses)
            for call in calls:
                if call[0] not in foreseen:
                    self._note(call)
            plan = self._plan_of(list(self._uses.values()), self._rooms(calls))
            choices = dict(zip(self._uses, plan.choices, strict=True))
            kept = {
                record for record, choice in choices.items()
                if not choice.recomputed and choice.algorithm != INSTANTIATE
            }  # fmt: skip
            sizes = {
                record: choice.bytes for record, choice in choices.items()
                if choice.algorithm == INSTANTIATE
            }  # fmt: skip
            roundable = {
                record for record, use in self._uses.items()
                if self._policy.norm_algorithm == "auto"
                and use.element_size == 4 and use.tokens > 1
                and use.tokens * use.inputs * use.outputs >= LEAST_ROUNDED
                and (self._policy.two_passes or not choices[record].recomputed)
                and not self._is_whole_on_several_ranks(record)
            }  # fmt: skip
            known = self._plans.of_calls[key] = plan, choices, kept, sizes, roundable
        self.plan, self.choices, self.kept_as_they_are, self.gradient_bytes, self.roundable = known
        self._plans.last, self.runs_twice = self.plan, not self.plan.is_one_pass

    def _is_whole_on_several_ranks(self, record: Trainable) -> bool:
        """Returns whether one rank's norm of a weight clips what others sum, by their own plans."""
        context = self._context
        if not context.reducer.splits_parameters:
            return False
        return not context.sharding.parts[record.parameter].split

    def choice_of(self, record: Trainable, pair: tuple[Tensor, Tensor]) -> LayerPlan:
        """Returns how the factors of a weight are handled; `pair`: [B, T, d] and [B, T, p]."""
        choice = self.choices.get(record)
        if choice is None:  # its forward was not seen
            left, right = pair
            self._note((record, right.shape, right.dtype, left.shape[-1]))
            (choice,) = self._plan_of([self._uses[record]]).choices
        return choice

    def _plan_of(self, uses: list[LinearShape], rooms: list[tuple[int, int]] | None = None) -> Plan:
        key = tuple(uses)
        known = self._plans.known.get(key)
        if known is None:
            known = self._plans.known[key] = Plan(
                uses, rates_of(self._device), self._budget(), self._policy.norm_algorithm,
                may_recompute=self._policy.may_run_twice,
                rooms=rooms,
            )  # fmt: skip
        return known

    @property
    def _saved(self) -> int:
        """Returns the bytes that the forward has saved for its backward."""
        return allocated(self._device) - self.at_first

    def _budget(self) -> int | None:
        """Returns the bytes to keep: `memory_budget`, or what a non-private step would hold."""
        policy = self._policy
        if self._context.streams:
            return None  # no more is kept than waits for a launch
        if policy.memory_budget is not None:
            return policy.memory_budget
        return 0 if policy.two_passes else int(MEMORY_FRACTION * self._held())

    def _held(self) -> int:
        """Returns the bytes that a non-private step would hold, of those that ours does not.

        The larger of two: what the forward has saved, which backward frees, and the gradients that
        backward would leave.
        """
        forecast = self._forecast
        if forecast is None:
            held = self._saved
        else:
            held = forecast.held * forecast.planned(self._batch_size)
            held = min(held, self._plans.saved.get(self._shapes, held))
        gradients = sum(local(one.parameter).nbytes for one in self._context.capture.trained)
        return max(held, gradients)

    def _rooms(self, calls: list[Call]) -> list[tuple[int, int]] | None:
        """Returns bytes to keep of planned uses from a number on; None: the forward was not seen.

        One is for when backward has come to a weight. What the forward had saved before its first
        use is still there then, but for the input, which is among what is kept. The others are for
        when it has come to another layer: what is kept of those behind it takes part of the memory,
        as do the gradients that its own backward has at a time, like an ordinary one.
        """
        if not isinstance(calls, MeasuredCalls) or self._policy.memory_budget is not None:
            return None
        held, rooms, known = self._held(), list[tuple[int, int]](), set[Trainable]()
        seen = []  # how many planned weights were before each call
        for (record, shape, dtype, _), used in zip(calls, calls.bytes, strict=True):
            seen.append(len(known))
            if record not in known:
                before = used - self.at_first - shape.numel() * dtype.itemsize
                rooms.append((len(known), held - max(0, before)))
                known.add(record)
        seen.append(len(known))
        peak = max([held, *(used - self.at_first for _, used, _, _ in calls.others)])
        kept = 0
        for number, used, passing, own in reversed(calls.others):
            kept += own
            rooms.append((seen[number], peak - (used - self.at_first) - passing - kept))
        return rooms
