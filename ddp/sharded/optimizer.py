"""An optimizer of which every rank runs the part that belongs to its own slices.

Adam keeps two float32 numbers per parameter, on every rank the same. If each rank steps its slice
only, it keeps its slice's state only: 1/W of the memory and of the work.

Ordinary optimizers step this rank's pieces, one for each of a few groups of units. Group by group
the model publishes the new values, so that the transfer of one runs beside the step of the next
one. One for each unit would take the host longer than the GPU. To the outside it is one optimizer
over the network's parameters: learning-rate schedulers change its `param_groups`, and `state_dict`
is that of the optimizer on one process.
"""

from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NoReturn, Protocol

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.gradients import Gradients
from ddp.sharded.elementwise import refuse_not_elementwise
from ddp.sharded.layout import FlatUnit, Piece
from ddp.sharded.state import Part, cut, entries, gather

NOT_REDUCED = (
    "a parameter of shape {shape} has a gradient that is this rank's alone: call "
    "finish_gradient_synchronization() between backward() and optimizer.step(); to change reduced "
    "gradients, write to those that model.gradient_pieces() returns"
)

FAILED = (  # the error comes last: messages between ranks are cut
    "optimizer.step() has failed on rank {rank}, and nothing has changed on any rank: {error}"
)
BROKEN = (
    "a step was applied in part, for it has failed on rank {rank} and other ranks have stepped "
    "their slices: load a checkpoint on all ranks, by optimizer.load_state_dict() too: {error}"
)

NOT_THE_SAME = (
    "ranks are about to do different things, and nothing has changed on any of them: {acts}. {cure}"
)
AS_OFTEN = "Every rank must step as often as the others: leave a step out on all of them or on none"
ON_ALL = (
    "Every forward is a call of all ranks: to evaluate on one rank, let all enter `with "
    "model.whole_parameters():`"
)


GROUPS = 4  # of units, each stepped at once
LISTS = ("params", "param_names")  # of a group, of which every rank has its own part


class ShardedModel(Protocol):
    """The interface that the optimizer calls; `ddp.sharded.interface.Sharded` describes it."""

    gradients: Gradients
    units: list[FlatUnit]
    reductions: int

    def exchange(self, status: str) -> list[str]: ...
    def refuse_unfinished(self) -> None: ...
    def begin_step(self, units: list[FlatUnit]) -> None: ...
    def publish(self, unit: FlatUnit) -> None: ...
    def end_step(self, parameters: list[Parameter]) -> None: ...


def refuse_not_reduced(units: list[FlatUnit]) -> None:
    """Raises RuntimeError if some parameter's `.grad` is neither None nor a stand-in."""
    for unit in units:
        for parameter in unit.parameters:
            if parameter.grad is not None and not unit.is_stand_in(parameter.grad):
                raise RuntimeError(NOT_REDUCED.format(shape=list(parameter.shape)))


class ToldError(RuntimeError):
    """An error that every rank raises: none has to be told of it again."""


def status_of(act: str, message: str = "") -> str:
    """Returns what a rank tells the others: what it is about to do, and why it cannot."""
    return f"{act}\n{message}"


def agree(exchange: Callable[[str], list[str]], act: str, message: str = "") -> None:
    """Returns once all ranks are about to do the same; a collective call.

    A step and, in `fsdp`, a forward are collective: if one rank left one out, the others would pair
    it with the next one, and apply half of a step.

    Args:
        exchange: tells all ranks the status of this one, and returns those of all.

    Raises:
        ToldError: on every rank, if one has a message, or is about to do something else.
    """
    told = [status.partition("\n")[::2] for status in exchange(status_of(act, message))]
    if message := next((each for _, each in told if each), ""):
        raise ToldError(message)
    ranks: dict[str, list[int]] = {}
    for rank, (other, _) in enumerate(told):
        ranks.setdefault(other, []).append(rank)
    if len(ranks) > 1:
        acts = ", ".join(f"{other} on rank {first}" for other, (first, *_) in ranks.items())
        cure = (
            ON_ALL
            if any(" without " in other or " in eval" in other for other in ranks)
            else AS_OFTEN
        )
        raise ToldError(NOT_THE_SAME.format(acts=acts, cure=cure))


def together(step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a `step` one in which a rank that fails before it has changed anything tells all.

    It may fail in a hook, which PyTorch calls around `step`, be refused, or in the closure behind
    its last collective call; before that, others wait for its gradients until their timeout.
    """
    with_hooks = Optimizer.profile_hook_step(step)

    @wraps(step)
    def begin(self: "ShardedOptimizer", *args: Any, **kwargs: Any) -> Any:
        self._has_agreed = False
        try:
            return with_hooks(self, *args, **kwargs)
        except ToldError:
            raise
        except Exception as error:
            if not self._has_agreed:
                self.model.exchange(status_of(self._act(), self._tell(FAILED, error)))
            raise

    begin.hooked = True  # type: ignore[attr-defined]  # PyTorch adds no hooks of its own
    return begin


class ShardedOptimizer(Optimizer):
    """Steps this rank's slices of a sharded model; other ranks step the rest.

    `step` is a collective call. If a rank fails before it has changed anything, all ranks raise.

    Several optimizers may each have some of the parameters, the same ones on every rank. A unit
    is gathered by each optimizer that has a parameter of it.

    Args:
        model: the wrapper that owns the slices.
        cls: an optimizer that treats every element alone, such as SGD, Adam, AdamW or RMSprop.
        params: the network's parameters, or groups of them.
        options: further arguments of `cls`.

    Attributes:
        model, cls: that wrapper and that class.

    Raises:
        TypeError: for an optimizer that looks at a whole tensor's shape or norm.
        ValueError: for a parameter that the model does not train.
    """

    steps_slices = True  # layout.py refuses others

    def __init__(
        self, model: ShardedModel, cls: Callable[..., Optimizer], params: Any, **options: Any
    ):
        params = list(params)
        is_grouped = bool(params) and isinstance(params[0], dict)
        template = cls(
            [
                {**group, "params": [Parameter(torch.zeros_like(model.units[0].shard[:1, None]))]}
                for group in (params if is_grouped else [{}])
            ],
            **options,
        )
        self._is_built = False
        super().__init__(params, template.defaults)
        self.model, self.cls, self._is_built = model, type(template), True
        self._make = partial(cls, **options)
        refuse_not_elementwise(self._make, self._settings(), self.cls.__name__)
        self._broken = ""  # why the last step was applied in part
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        trained = {p for unit in model.units for p in unit.parameters}
        if unknown := [list(p.shape) for p in group_of if p not in trained]:
            raise ValueError(f"the wrapped network does not train parameters of shapes {unknown}")
        self._stepped_together: list[list[Part]] = []
        self._units = [unit for unit in model.units if any(p in group_of for p in unit.parameters)]
        self._held = [p for unit in self._units for p in unit.parameters if p in group_of]
        for units in _in_groups(self._units):
            owned = [[(piece, _own(unit, piece)) for piece in unit.pieces] for unit in units]
            groups = [{**settings, "params": []} for settings in self._settings()]
            for unit, own in zip(units, owned, strict=True):
                for piece, parameter in own:
                    if (number := group_of.get(unit.parameters[piece.member])) is not None:
                        groups[number]["params"].append(parameter)
            inner = self._make(groups)
            parts = [(unit, own, inner) for unit, own in zip(units, owned, strict=True)]
            self._stepped_together.append(parts)
        self._parts = [part for parts in self._stepped_together for part in parts]
        self._share_state(self._parts)
        for mode in ("train", "eval"):  # of a schedule-free optimizer: others have neither
            if callable(getattr(template, mode, None)):
                setattr(self, mode, partial(self._enter, mode))

    @together
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps this rank's slices, and returns when all parameters have their new values.

        Raises:
            RuntimeError: if gradients were not reduced, or if another rank has failed before it
                has stepped; nothing is changed. If one fails later, the next step raises on all.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            refuse_not_reduced(self.model.units)
            self.model.refuse_unfinished()
            self.model.begin_step(self._units)
            self._agree()
            failure, settings = None, self._settings()
            for parts in self._stepped_together:
                try:
                    if failure is None:
                        self._step(parts, settings)
                except Exception as error:  # other ranks wait for this one's slices
                    failure, self._broken = error, self._tell(BROKEN, error)
                for unit, *_ in parts:
                    self.model.publish(unit)
            self.model.end_step(self._held)
            if failure is not None:
                raise failure
            self._take_settings()
        return loss

    @torch.no_grad()
    def _enter(self, mode: str) -> None:
        """Calls `train()` or `eval()`, which may change the parameters; a collective call."""
        settings = self._settings()
        self.model.begin_step(self._units)
        agree(self.model.exchange, f"optimizer.{mode}()", self._broken)
        for parts in self._stepped_together:
            self._give_settings(parts, settings)
            getattr(parts[0][2], mode)()
            for unit, *_ in parts:
                self.model.publish(unit)
        self.model.end_step(self._held)
        self._take_settings()

    def _agree(self) -> None:
        """Returns once all ranks are about to step.

        Raises:
            RuntimeError: if one has failed, here or in its last step, or takes another step.
        """
        self._has_agreed = True
        agree(self.model.exchange, self._act(), self._broken)

    def _act(self) -> str:
        """Returns what ranks that take the same step say."""
        return f"optimizer.step() behind reduction {self.model.reductions}"

    def _tell(self, message: str, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}"
        return message.format(rank=self.model.units[0].rank, error=text)

    def _step(self, parts: list[Part], settings: list[dict[str, Any]]) -> None:
        inner, known = parts[0][2], len(parts[0][2].state)
        for unit, own, _ in parts:
            for piece, parameter in own:
                gradient = unit.gradient_of(piece)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self._give_settings(parts, settings)
        inner.step()
        if len(inner.state) != known:
            self._share_state(parts)
        for _, own, _ in parts:
            for _, parameter in own:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks, in the format of `cls` on one process, on the CPU.

        A collective call: every rank must take part, and every rank gets the whole.
        """
        own, self.state = self.state, gather(self._parts)
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
        gradients = self.model.gradients
        names = dict(zip(gradients.parameters, gradients.names, strict=True))
        found = entries(state_dict, self.param_groups, names, self._make)
        piece_of = {
            unit.parameters[piece.member]: piece for unit, own, _ in self._parts for piece, _ in own
        }
        state = {}
        for parameter, values in found.values():
            own = {k: cut(k, v, parameter, piece_of.get(parameter)) for k, v in values.items()}
            if parameter in piece_of:
                state[parameter] = own
        super().load_state_dict({**state_dict, "state": {}})
        self._broken = ""
        for parts in self._stepped_together:
            self._load(parts, state)

    def _load(self, parts: list[Part], state: dict[Parameter, dict[str, Any]]) -> None:
        """Loads this rank's parts of a state, each in the dtype of the slice that is stepped.

        That of the network's parameter may be another one, as with `fsdp`'s `param_dtype`.
        """
        inner = parts[0][2]
        number = {p: i for i, p in enumerate(p for g in inner.param_groups for p in g["params"])}
        groups = [
            {**settings, "params": [number[p] for p in group["params"]]}
            for group, settings in zip(inner.param_groups, self._settings(), strict=True)
        ]
        loaded = {
            number[own_parameter]: state[parameter]
            for unit, own, _ in parts
            for piece, own_parameter in own
            if (parameter := unit.parameters[piece.member]) in state
        }
        inner.load_state_dict({"state": loaded, "param_groups": groups})
        self._share_state(parts)

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

    def _settings(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in LISTS}
            for group in self.param_groups
        ]

    def _give_settings(self, parts: list[Part], settings: list[dict[str, Any]]) -> None:
        for group, values in zip(parts[0][2].param_groups, settings, strict=True):
            group.update(values)

    def _take_settings(self) -> None:
        """Takes what a step has changed in the groups, as a count, from the slices' optimizers."""
        inner = self._stepped_together[-1][0][2]
        for group, changed in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in changed.items() if key not in LISTS})

    def _share_state(self, parts: list[Part]) -> None:
        """Shows the state of this rank's pieces under the network's parameters."""
        for unit, own, inner in parts:
            for piece, parameter in own:
                if parameter in inner.state:
                    self.state[unit.parameters[piece.member]] = inner.state[parameter]


def _in_groups(units: list[FlatUnit]) -> list[list[FlatUnit]]:
    """Returns the units in order, in at most `GROUPS` groups of about as many elements."""
    ends = list(accumulate(unit.shard.numel() for unit in units))
    size = max(1, -(-ends[-1] // GROUPS))
    groups: dict[int, list[FlatUnit]] = {}
    for unit, end in zip(units, ends, strict=True):
        groups.setdefault(max(0, end - 1) // size, []).append(unit)
    return list(groups.values())


def _own(unit: FlatUnit, piece: Piece) -> Parameter:
    """Returns the parameter that is stepped: a view of this rank's slice, with any `.grad`."""
    own = Parameter(unit.shard.narrow(0, piece.start, piece.numel))
    own.grad_dtype = None
    return own
