"""An optimizer of which every rank runs the part that belongs to its own slices.

Adam keeps two float32 numbers per parameter, on every rank the same. If each rank steps its slice
only, it keeps its slice's state only: 1/W of the memory and of the work.

Ordinary optimizers step this rank's pieces, one for each of a few groups of units. Group by group
the model publishes the new values, so that the transfer of one runs beside the step of the next
one. One for each unit would take the host longer than the GPU. To the outside it is one optimizer
over the network's parameters: learning-rate schedulers change its `param_groups`, and `state_dict`
is that of the optimizer on one process.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp.sharded.layout import FlatUnit, Piece, not_whole

NOT_ELEMENTWISE = (
    "{name} looks at whole tensors, and here each rank steps a slice of every tensor: use SGD, "
    "Adam, AdamW or another optimizer that treats every element alone, or a variant with whole "
    'gradients, as wrap("ddp_bucketed", module)'
)


PLAIN = (
    "{name} steps whole parameters, and of one of shape {shape} this rank has its own slice only, "
    "or the gradient of that: build it by model.make_optimizer({name}, lr=...), with the wrapper "
    "that reduced the gradients; if that was deleted, wrap the network and run a backward again"
)


NOT_REDUCED = (
    "a parameter of shape {shape} has a gradient that is this rank's alone: call "
    "finish_gradient_synchronization() between backward() and optimizer.step(); to change reduced "
    "gradients, write to those that model.gradient_pieces() returns"
)


@register_optimizer_step_pre_hook
def refuse_plain(optimizer: Optimizer, *_arguments: Any) -> None:
    """Raises RuntimeError before a plain optimizer steps what is not whole, gradient or value."""
    if isinstance(optimizer, ShardedOptimizer):
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if (p := not_whole(parameters)) is not None:
        name, shape = type(optimizer).__name__, list(p.shape)
        raise RuntimeError(PLAIN.format(name=name, shape=shape))


Part = tuple[FlatUnit, list[tuple[Piece, Parameter]], Optimizer]
"""A unit, this rank's pieces of it with the parameter that is stepped for each, and by which."""

GROUPS = 4  # of units, each stepped at once


class ShardedModel(Protocol):
    """The interface that the optimizer calls; `ddp.sharded.interface.Sharded` describes it."""

    process_group: dist.ProcessGroup
    units: list[FlatUnit]

    def begin_step(self, units: list[FlatUnit]) -> None: ...
    def publish(self, unit: FlatUnit) -> None: ...
    def end_step(self, parameters: list[Parameter]) -> None: ...


def refuse_not_reduced(units: list[FlatUnit]) -> None:
    """Raises RuntimeError if some parameter's `.grad` is neither None nor a stand-in."""
    for unit in units:
        for parameter in unit.parameters:
            if parameter.grad is not None and not unit.is_stand_in(parameter.grad):
                raise RuntimeError(NOT_REDUCED.format(shape=list(parameter.shape)))


class ShardedOptimizer(Optimizer):
    """Steps this rank's slices of a sharded model; other ranks step the rest.

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

    def __init__(
        self, model: ShardedModel, cls: Callable[..., Optimizer], params: Any, **options: Any
    ):
        template = cls([Parameter(torch.zeros_like(model.units[0].shard[:1, None]))], **options)
        if not treats_elements_alone(cls, options):
            raise TypeError(NOT_ELEMENTWISE.format(name=type(template).__name__))
        self._is_built = False
        super().__init__(params, template.defaults)
        self.model, self.cls, self._is_built = model, type(template), True
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
            inner = cls(groups, **options)
            parts = [(unit, own, inner) for unit, own in zip(units, owned, strict=True)]
            self._stepped_together.append(parts)
        self._parts = [part for parts in self._stepped_together for part in parts]
        self._share_state(self._parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps this rank's slices, and returns when all parameters have their new values.

        Raises:
            RuntimeError: if gradients were not reduced; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            refuse_not_reduced(self.model.units)
            self.model.begin_step(self._units)
            for parts in self._stepped_together:
                self._step(parts)
            self.model.end_step(self._held)
        return loss

    def _step(self, parts: list[Part]) -> None:
        inner, known = parts[0][2], len(parts[0][2].state)
        for unit, own, _ in parts:
            for piece, parameter in own:
                gradient = unit.gradient_of(piece)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        for group, settings in zip(inner.param_groups, self._settings(), strict=True):
            group.update(settings)
        inner.step()
        if len(inner.state) != known:
            self._share_state(parts)
        for unit, own, _ in parts:
            for _, parameter in own:
                parameter.grad = None
            self.model.publish(unit)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks, in the format of `cls` on one process, on the CPU.

        A collective call: every rank must take part, and every rank gets the whole.
        """
        own, self.state = self.state, self._whole_state()
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
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        parameter_of = dict(zip(saved, mine, strict=False))  # numbers are compared below
        piece_of = {
            unit.parameters[piece.member]: piece for unit, own, _ in self._parts for piece, _ in own
        }
        state = {}
        for number, values in state_dict["state"].items():
            if (parameter := parameter_of.get(number)) is None:
                continue
            cut = {k: _cut(k, v, parameter, piece_of.get(parameter)) for k, v in values.items()}
            if parameter in piece_of:
                state[parameter] = cut
        super().load_state_dict({**state_dict, "state": {}})
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
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]

    def _share_state(self, parts: list[Part]) -> None:
        """Shows the state of this rank's pieces under the network's parameters."""
        for unit, own, inner in parts:
            for piece, parameter in own:
                if parameter in inner.state:
                    self.state[unit.parameters[piece.member]] = inner.state[parameter]

    def _whole_state(self) -> defaultdict[Tensor, Any]:
        whole: defaultdict[Tensor, Any] = defaultdict(dict)
        for unit, own, inner in self._parts:
            mine = {
                piece.member: {
                    key: value.dtype if _is_elementwise(key, value, parameter) else _on_cpu(value)
                    for key, value in inner.state[parameter].items()
                }
                for piece, parameter in own
                if parameter in inner.state
            }
            everyone: list[dict[int, dict[str, Any]]] = [{}] * unit.layout.world_size
            dist.all_gather_object(everyone, mine, group=unit.group)
            found = {member: values for theirs in everyone for member, values in theirs.items()}
            for member in sorted(found):
                whole[unit.parameters[member]] = dict(found[member])
            kinds = {
                (key, value)
                for values in found.values()
                for key, value in values.items()
                if isinstance(value, torch.dtype)
            }
            for key, dtype in sorted(kinds, key=str):
                flat = torch.zeros_like(unit.shard, dtype=dtype)
                for piece, parameter in own:
                    value = inner.state.get(parameter, {}).get(key)
                    if value is not None and value.dtype == dtype:
                        flat.narrow(0, piece.start, piece.numel).copy_(value)
                for member, values in enumerate(unit.gather(flat)):
                    if found.get(member, {}).get(key) == dtype:
                        whole[unit.parameters[member]][key] = values.to("cpu", copy=True)
        return whole


def _in_groups(units: list[FlatUnit]) -> list[list[FlatUnit]]:
    """Returns the units in order, in at most `GROUPS` groups of about as many elements."""
    ends = list(accumulate(unit.shard.numel() for unit in units))
    size = max(1, -(-ends[-1] // GROUPS))
    groups: dict[int, list[FlatUnit]] = {}
    for unit, end in zip(units, ends, strict=True):
        groups.setdefault(max(0, end - 1) // size, []).append(unit)
    return list(groups.values())


def treats_elements_alone(cls: Callable[..., Optimizer], options: dict[str, Any]) -> bool:
    """Returns whether stepping a matrix and stepping parts of it give the same, by trying it."""
    implementations = ("capturable", "foreach", "fused")
    options = {key: value for key, value in options.items() if key not in implementations}
    start = torch.linspace(-1.0, 1.0, 16)

    def stepped(parts: list[Tensor]) -> Tensor:
        parameters = [Parameter(part.clone()) for part in parts]
        optimizer = cls(parameters, **options)
        for group in optimizer.param_groups:
            group["lr"] = 0.1  # none, as a schedule may begin with, would show nothing
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.sin(3 * parameter.detach())
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in parameters])

    try:
        return torch.allclose(stepped([start.view(4, 4)]), stepped([*start.split([6, 10])]))
    except Exception:  # wants matrices, sparse gradients, a closure
        return False


def _own(unit: FlatUnit, piece: Piece) -> Parameter:
    """Returns the parameter that is stepped: a view of this rank's slice, with any `.grad`."""
    own = Parameter(unit.shard.narrow(0, piece.start, piece.numel))
    own.grad_dtype = None
    return own


def _is_elementwise(key: str, value: Any, piece: Tensor) -> bool:
    """Returns whether a value of the state has one element for each of the parameter's.

    Raises:
        TypeError: if it has neither that nor a single one.
    """
    if not isinstance(value, Tensor) or key == "step" or value.dim() == 0:
        return False
    if value.shape != piece.shape:
        raise TypeError(
            f"the optimizer's {key} is {list(value.shape)} for {piece.numel()} elements"
        )
    return True


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _cut(key: str, value: Any, parameter: Parameter, piece: Piece | None) -> Any:
    """Returns a piece's part of a whole value of a parameter's state, a copy."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or (value.dim() == 0 and parameter.dim() > 0):
        return value.clone()
    if value.shape != parameter.shape:
        raise ValueError(
            f"the optimizer's state is of another network: {key} is {list(value.shape)} for a "
            f"parameter {list(parameter.shape)}"
        )
    if piece is None:
        return None
    return value.reshape(-1).narrow(0, piece.offset, piece.numel).clone()
