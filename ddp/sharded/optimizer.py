"""An optimizer of which every rank runs the part that belongs to its own slices.

Adam keeps two float32 numbers per parameter, on every rank the same. If each rank steps its slice
only, it keeps its slice's state only: 1/W of the memory and of the work.

Ordinary optimizers step this rank's pieces, one for each of a few groups of units. Group by group
the model publishes the new values, so that the transfer of one runs beside the step of the next
one. One for each unit would take the host longer than the GPU. To the outside it is one optimizer
over the network's parameters: learning-rate schedulers change its `param_groups`, and `state_dict`
is that of the optimizer on one process.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.gradients import Gradients
from ddp.sharded.layout import FlatUnit, Piece
from ddp.sharded.state import IMPLEMENTATIONS, Part, cut, entries, gather, told_to_train

NOT_ELEMENTWISE = (
    "{name} looks at whole tensors, at several together or at the loss, and here each rank steps a "
    "slice of every tensor{error}: use SGD, Adam, AdamW or another optimizer that treats every "
    'element alone, or a variant with whole gradients, as wrap("ddp_bucketed", module)'
)


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


TRIALS = ((torch.float64, 1e-6), (torch.float32, 1e-3))  # the second, if the first one raises
TRIAL_STEPS = 32
TRIAL_SHAPES = ((129, 128), (4, 3, 2, 2), (16,), (2,))


def refuse_not_elementwise(
    make: Callable[..., Optimizer], settings: list[dict[str, Any]], name: str
) -> None:
    """Raises TypeError unless each element's step follows from its own gradients, by trying it.

    Args:
        make: makes an optimizer from parameter groups.
        settings: those of the groups.
        name: of the optimizer's class.
    """
    error = ""
    unlike = {"lr", "initial_lr", *IMPLEMENTATIONS}
    groups = [
        {key: value for key, value in group.items() if key not in unlike} for group in settings
    ]
    groups = list({repr(group): group for group in groups}.values())
    for dtype, tolerance in TRIALS:
        try:
            if _treats_elements_alone(make, groups, dtype, tolerance):
                return
            error = ""
            break
        except Exception as exception:  # wants matrices, sparse gradients, a closure
            error = f" (a trial ended in {type(exception).__name__}: {exception})"
    raise TypeError(NOT_ELEMENTWISE.format(name=name, error=error))


def _treats_elements_alone(
    make: Callable[..., Optimizer],
    groups: list[dict[str, Any]],
    dtype: torch.dtype,
    tolerance: float,
) -> bool:
    """Returns whether one optimizer of whole tensors steps as one optimizer for each part of them.

    What depends on several elements may show late, or with some gradients only. So there are many
    steps, and gradients that are large or small, persistent or orthogonal to the values, and in the
    end not finite. Numbers that an optimizer estimates are compared too, as their effect is small
    at first. One part's optimizer is told the loss.
    """

    def made(parameters: dict[int, list[Parameter]]) -> Optimizer:
        optimizer = make([{**own, "params": parameters.get(i, [])} for i, own in enumerate(groups)])
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # none, as a schedule may begin with, would show nothing
        return told_to_train(optimizer)

    wholes = {i: [_trial_value(shape, dtype) for shape in TRIAL_SHAPES] for i in range(len(groups))}
    whole = made(wholes)
    parts = []
    for i, parameter in ((i, parameter) for i, held in wholes.items() for parameter in held):
        numel = parameter.numel()
        for place in (slice(5 * numel // 8), slice(5 * numel // 8, numel)):
            part = Parameter(parameter.detach().reshape(-1)[place].clone())
            parts.append((parameter, place, part, made({i: [part]})))
    takes_loss = "closure" in inspect.signature(whole.step).parameters
    for step in range(TRIAL_STEPS):
        before = {p: p.detach().clone() for held in wholes.values() for p in held}
        gradients = {p: _trial_gradient(p, i, step) for i, p in enumerate(before)}
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.clone()
        whole.step()
        estimates = _estimates(whole)
        told: Any = partial(torch.tensor, 10 ** (2 * math.sin(2.1 * step)))  # a loss
        for parameter, place, part, alone in parts:
            part.grad = gradients[parameter].reshape(-1)[place].clone()
            is_told = takes_loss and place.stop == 1  # which others are not
            alone.step(told) if is_told else alone.step()
            change = (parameter.detach() - before[parameter]).abs().nan_to_num(0.0, 0.0)
            limits = {
                "rtol": 1e4 * torch.finfo(dtype).eps, "atol": tolerance * change.max().item()
            }  # fmt: skip
            expected = parameter.detach().reshape(-1)[place]
            if not torch.allclose(part.detach(), expected, **limits, equal_nan=True):
                return False
            for key, value in () if is_told else _estimates(alone).items():
                if not math.isclose(value, estimates.get(key, value), rel_tol=tolerance):
                    return False
    return True


def _trial_value(shape: tuple[int, ...], dtype: torch.dtype) -> Parameter:
    return Parameter(1 + 0.5 * torch.arange(math.prod(shape), dtype=dtype).sin().view(shape))


def _trial_gradient(parameter: Parameter, number: int, step: int) -> Tensor:
    """Returns one of a size between 1e-4 and 1e4."""
    value = parameter.detach()
    place = torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
    gradient = (0.7 * place).cos() + 0.3 * (1.3 * place + step).sin()
    if value.dim() > 1 and step % 4 == 2:
        rows, along = gradient.flatten(1), value.flatten(1)
        along = along / along.norm(dim=1, keepdim=True)
        gradient = (rows - (rows * along).sum(1, keepdim=True) * along).view(value.shape)
    gradient *= 10 ** (4 * math.sin(1.7 * number + 0.9 * step))
    if number == 0 and step == TRIAL_STEPS - 1:
        gradient.view(-1)[0] = math.inf
    return gradient


def _estimates(optimizer: Optimizer) -> dict[Any, float]:
    """Returns the numbers that an optimizer keeps for all its parameters, but for counts."""
    held = [(None, vars(optimizer)), *enumerate(optimizer.param_groups)]
    return {
        (number, key): float(value)
        for number, values in held
        for key, value in values.items()
        if isinstance(value, float)
        or (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point())
    }


def _own(unit: FlatUnit, piece: Piece) -> Parameter:
    """Returns the parameter that is stepped: a view of this rank's slice, with any `.grad`."""
    own = Parameter(unit.shard.narrow(0, piece.start, piece.numel))
    own.grad_dtype = None
    return own
