"""Plans how each linear layer of a step is handled, by its uses in forward."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor

from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.distributed.dtensor import local
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.recorder import Trainable
from dp_clipping.modes import Policy
from dp_clipping.planning.cost_model import LayerPlan, LinearShape, Rates
from dp_clipping.planning.plan import Plan, Plans

MEMORY_FRACTION = (
    0.93  # of an ordinary step's memory: the rest is for what backward holds in passing
)


class LayerPlans:
    """The plan of one step.

    Args:
        parameters: all trainable ones.
        policy: how the mode works.
        plans: those of earlier steps.
        batch_size: samples of the batch.
        forecast: expected shapes of compiled linear layers (`CompiledShapes`); None: not needed.
        rates: the rates of the device, read when a plan is made.
        saved: bytes that the forward has saved for its backward.
    """

    def __init__(
        self,
        parameters: list[Trainable],
        policy: Policy,
        plans: Plans,
        batch_size: int,
        forecast: Any,
        rates: Callable[[], Rates],
        saved: Callable[[], int],
    ):
        self._parameters = parameters
        self._policy, self._plans = policy, plans
        self._batch_size, self._forecast = batch_size, forecast
        self._rates, self._saved = rates, saved
        self._uses = {} if forecast is None else forecast.of_batch(batch_size)
        self._foreseen = set(self._uses)
        self._shapes = tuple(self._uses.values())  # expected ones
        self.plan: Plan | None = None
        self._choices: dict[Trainable, LayerPlan] = {}  # of the plan

    def will_use(self, parameter: Trainable, x: Tensor, outputs: int) -> None:
        """Records that a linear layer is about to run on x [.., p], once for each of its uses."""
        if parameter in self._foreseen or self.plan is not None:  # a checkpoint runs forward again
            return
        self._note(parameter, x, outputs)

    def _note(self, parameter: Trainable, x: Tensor, outputs: int) -> None:
        inputs = x.shape[-1]
        tokens = x.numel() // max(1, inputs * self._batch_size)
        if (known := self._uses.get(parameter)) is not None:
            self._uses[parameter] = known._replace(tokens=known.tokens + tokens)
            return
        self._uses[parameter] = LinearShape(
            parameter.name, self._batch_size, tokens, inputs, outputs,
            x.element_size(), stored_dtype(x.dtype).itemsize,
        )  # fmt: skip

    def prefers_dense(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Returns False: the plan decides when factors arrive."""
        return False

    def slots_of(self, private_step: Any, handle: LayerState) -> dict[str, Tensor] | None:
        """Returns a linear layer's slots in a compiled region; None: one for each parameter."""
        forecast = self._forecast
        parameter = handle.parameters().get("weight")
        if forecast is None or parameter is None or parameter not in forecast.uses:
            return None
        slots = forecast.slots(private_step, handle, self.ahead[parameter.name].algorithm)
        if "bias" in handle.trainable:
            slots["bias"] = private_step.slot(handle.parameter("bias"))
        return slots

    @cached_property
    def ahead(self) -> Plan:
        """Returns the plan for the expected shapes, before the forward."""
        return self._plan_of(list(self._shapes))

    def foresaw_too_much(self) -> bool:
        """Returns whether a compiled forward has saved so little that the plan is another one.

        The compiler saves less than an eager forward, because backward computes activations again.
        How much is known after a forward, and is measured once for each set of shapes.
        """
        saved = self._saved()
        if self._forecast is None or not self._batch_size * saved:
            return False
        if self._shapes in self._plans.saved:
            return False
        before = self.ahead
        planned = self._forecast.planned(self._batch_size)
        self._plans.saved[self._shapes] = saved * planned // self._batch_size
        self._plans.known.pop(self._shapes)
        return self._plan_of(list(self._shapes)).choices != before.choices

    def make(self) -> Plan:
        """Makes the plan, after the forward has called all layers."""
        self.plan = self._plan_of(list(self._uses.values()))
        self._choices = dict(zip(self._uses, self.plan.choices, strict=True))
        return self.plan

    def choice_of(self, parameter: Trainable, factors: Any) -> LayerPlan:
        """Returns how a layer's factors are handled."""
        choice = self._choices.get(parameter)
        if choice is None:
            left, right = factors.operands  # its forward was not seen
            self._note(parameter, right, left.shape[-1])
            (choice,) = self._plan_of([self._uses[parameter]]).choices
        return choice

    def _plan_of(self, uses: list[LinearShape]) -> Plan:
        key = tuple(uses)
        known = self._plans.known.get(key)
        if known is None:
            known = self._plans.known[key] = Plan(
                uses, self._rates(), self._budget(), self._policy.norm_algorithm,
                may_recompute=self._policy.may_run_twice,
            )  # fmt: skip
        return known

    def _budget(self) -> int | None:
        """Returns the bytes to keep: `memory_budget`, or what a non-private step would hold.

        The latter is the larger of two: what the forward has saved, which backward frees, and the
        gradients that backward would leave.
        """
        policy, forecast = self._policy, self._forecast
        if policy.per_layer and not policy.two_passes:
            return None  # no more is kept than waits for a launch
        if policy.memory_budget is not None:
            return policy.memory_budget
        if policy.two_passes:
            return 0
        if forecast is None:
            held = self._saved()
        else:
            held = forecast.held * forecast.planned(self._batch_size)
            held = min(held, self._plans.saved.get(self._shapes, held))
        gradients = sum(local(one.parameter).nbytes for one in self._parameters)
        return int(MEMORY_FRACTION * max(held, gradients))
