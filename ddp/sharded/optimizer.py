"""An optimizer over a sharded network: to the outside one of whole parameters, here of slices.

Learning-rate schedulers change its `param_groups`, and its `state_dict` is that of the optimizer on
one process. An optimizer of slices steps those of this rank (slices.py).
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import optim
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.sharded.internals.agreement import BROKEN, FAILED, ToldError, agree, status_of
from ddp.sharded.internals.state import entries, gather_states, load, states
from ddp.sharded.layout import FlatUnit
from ddp.sharded.slices import Slices, options_of
from ddp.torch_compat import without_torch_functions

PARTS = 4
ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip
NOT_ELEMENTWISE = (
    "{name} may look at whole tensors, at several together or at the loss, and here each rank "
    "steps a slice of every tensor: use SGD, Adam, AdamW or another of torch.optim that treats "
    "every element alone; if {name} does, set {name}.treats_elements_alone = True; else use a "
    'variant with whole gradients, as wrap("ddp_bucketed", module)'
)


class ShardedOptimizer(Optimizer):
    """Steps this rank's slices of a sharded model; other ranks step the rest.

    `step` is a collective call. If a rank fails before it has changed anything, all ranks raise.

    Several optimizers may each have some of the parameters, the same ones on every rank. A unit
    is gathered by each optimizer that has a parameter of it.

    Args:
        model: the wrapper that owns the slices: internals/interface.py has what is called of it. A
            variant has `begin_step(units)`, called before the first one is stepped;
            `publish(unit)`, when a unit's `shard` has its new values; and
            `end_step(parameters)`, behind which every reader of these sees the new values.
        cls: an optimizer that treats every element alone: one of `ELEMENTWISE`, or a class with
            `treats_elements_alone = True`.
        params: the network's parameters, or groups of them.
        options: further arguments of `cls`.

    Attributes:
        model, cls: that wrapper and that class.

    Raises:
        TypeError: for an optimizer that may look at a whole tensor's shape or norm.
        ValueError: for a parameter that the model does not train.
    """

    def __init__(self, model: Any, cls: Callable[..., Optimizer], params: Any, **options: Any):
        self._is_built, self._broken = False, ""  # why the last step was applied in part
        self._make, params = partial(cls, **options), list(params)
        groups = params if params and isinstance(params[0], dict) else [{}]
        one = torch.zeros_like(model.units[0].shard[:1, None])
        template = self._make([{**group, "params": [Parameter(one.clone())]} for group in groups])
        super().__init__(params, template.defaults)
        self.model, self.cls, self._is_built = model, type(template), True
        if self.cls not in ELEMENTWISE and not getattr(self.cls, "treats_elements_alone", False):
            raise TypeError(NOT_ELEMENTWISE.format(name=self.cls.__name__))
        given = {p for group in self.param_groups for p in group["params"]}
        unknown = given.difference(*(unit.parameters for unit in model.units))
        if unknown == given or any(p.requires_grad for p in unknown):  # others are frozen
            shapes = [list(p.shape) for p in unknown]
            raise ValueError(f"the wrapped network does not train parameters of shapes {shapes}")
        self._units = [unit for unit in model.units if given.intersection(unit.parameters)]
        self._held = [p for unit in self._units for p in unit.parameters if p in given]
        # An optimizer that is not PyTorch's may count the calls of `step`: it gets one.
        self._parts = in_parts(self._units) if self.cls in ELEMENTWISE else [self._units]
        self._slices = Slices(self._units, self.param_groups, self._make)
        self._show_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps this rank's slices, and returns when all parameters have their new values.

        Raises:
            RuntimeError: if gradients were not reduced, or if another rank has failed before it
                has stepped; nothing is changed. If one fails later, the next step raises on all.
        """
        self._has_agreed = False
        try:
            return self._step(closure)
        except ToldError:
            raise
        except Exception as error:  # in a hook or the closure, or refused: others wait for this
            if not self._has_agreed:
                self.model.exchange(status_of(self._act(), self._tell(FAILED, error)))
            raise

    step.hooked = True  # type: ignore[attr-defined]  # PyTorch calls a user's hooks around `_step`

    @Optimizer.profile_hook_step
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), without_torch_functions():  # of stand-ins
            self.model.refuse_not_reduced()
            self._step_parts()
        return loss

    def _step_parts(self) -> None:
        """Steps some units after others once all ranks are about to, and publishes their slices."""
        self._take_options()
        self.model.begin_step(self._units)
        self._has_agreed = True
        agree(self.model.exchange, self._act(), self._broken)
        failure = None
        for units in self._parts:
            try:
                if failure is None:
                    self._slices.step(set(units), self.model.gradients.of)
            except Exception as error:  # other ranks wait for this one's slices
                failure, self._broken = error, self._tell(BROKEN, error)
            for unit in units:
                self.model.publish(unit)
        self.model.end_step(self._held)
        if failure is not None:
            raise failure
        slices = self._slices.optimizer
        for group, changed in zip(self.param_groups, slices.param_groups, strict=True):
            group.update(options_of(changed))  # as a count of steps
        if len(slices.state) != len(self.state):
            self._show_state()

    def _take_options(self) -> None:
        """Gives the optimizer of slices the options of the groups, which a schedule changes."""
        for own, group in zip(self._slices.optimizer.param_groups, self.param_groups, strict=True):
            own.update(options_of(group))

    def _act(self) -> str:
        """Returns what ranks that take the same step say."""
        return f"optimizer.step() behind reduction {self.model.gradients.reductions}"

    def _tell(self, message: str, error: Exception) -> str:
        what = f"{type(error).__name__}: {error}"
        return message.format(rank=self.model.units[0].rank, error=what)

    def _show_state(self) -> None:
        """Shows the state of this rank's pieces under the network's parameters."""
        self.state.update(states(self._slices).items())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks, in the format of `cls` on one process, on the CPU.

        A collective call: every rank must take part, and every rank gets the whole.
        """
        own, self.state = self.state, gather_states(self._units, self._slices)
        try:
            return super().state_dict()
        finally:
            self.state = own

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part of a whole state, of any number of ranks or a plain optimizer.

        Raises:
            ValueError: if it is that of another network; nothing is changed then.
        """
        # As they were when it was wrapped: inside of `whole_parameters` others are in the network.
        names = dict(zip(self.model.gradients.parameters, self.model.gradients.names, strict=True))
        found = entries(state_dict, self.param_groups, names)
        super().load_state_dict({**state_dict, "state": {}})
        self._broken = ""
        self._take_options()
        load(self._slices, found)
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            raise RuntimeError(
                "a sharded optimizer cannot get another parameter group: give all of them at once, "
                "model.make_optimizer(cls, params=[...])"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a sharded optimizer cannot be copied or pickled, because it steps slices of a model: "
            "build another one by make_optimizer() and load this one's state_dict()"
        )


def in_parts(units: list[FlatUnit]) -> list[list[FlatUnit]]:
    """Returns the units in order, in at most `PARTS` lists of about as many elements.

    A part for each unit would take the host longer than the GPU.
    """
    ends = list(accumulate(unit.slice_numel for unit in units))
    size = max(1, -(-ends[-1] // PARTS))
    parts: dict[int, list[FlatUnit]] = {}
    for unit, end in zip(units, ends, strict=True):
        parts.setdefault(max(0, end - 1) // size, []).append(unit)
    return list(parts.values())
