"""Whole states of an optimizer: gathers one from the ranks' pieces, checks and cuts one to load.

A whole state is what `state_dict()` of the optimizer returns on one process, so that it moves
between numbers of ranks and to and from a plain optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.ranks import gather
from ddp.sharded.part import Part
from ddp.sharded.pieces import Piece

IMPLEMENTATIONS = ("capturable", "foreach", "fused")
SHOWN = 8  # names in a message

Entries = dict[int, tuple[Parameter, dict[str, Any]]]
"""Number in a state -> the parameter that has it, and its values."""


def entries(
    state_dict: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    names: dict[Parameter, str],
    make: Callable[..., Optimizer],
    are_cut: bool = True,
) -> Entries:
    """Returns the entries of a whole state, checked, with the parameters they belong to.

    Args:
        groups: the parameter groups of the optimizer that loads it.
        names: of its parameters.
        make: makes another optimizer of its kind, from parameter groups.
        are_cut: values that are not one number must have the shape of their parameter.

    Raises:
        ValueError: for an entry of no parameter, and for values that do not fit a parameter; what
            a value must be is found by a step of such an optimizer.
    """
    saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    mine = list(chain.from_iterable(group["params"] for group in groups))
    parameter_of = dict(zip(saved, mine, strict=False))  # torch compares their numbers later
    if unknown := [number for number in state_dict["state"] if number not in set(saved)]:
        shown = [f"{number}: {names[p]}" for number, p in list(parameter_of.items())[:SHOWN]]
        raise ValueError(
            f"load_state_dict: the state has values of parameters {unknown}, which are in none of "
            f"its param_groups. The parameters are {', '.join(shown)}"
            f"{', ...' if len(parameter_of) > SHOWN else ''}"
        )
    kinds = _kinds(state_dict["param_groups"], make)
    found = {}
    for number, values in state_dict["state"].items():
        if (parameter := parameter_of.get(number)) is not None:
            for key, value in values.items():
                kind = kinds.get(key)
                if kind is None and are_cut and isinstance(value, Tensor):
                    kind = not _is_number(key, value, parameter)
                _check(key, value, parameter, names[parameter], kind)
            found[number] = (parameter, values)
    return found


def told_to_train(optimizer: Optimizer) -> Optimizer:
    """Calls `optimizer.train()` where there is one, as a schedule-free optimizer has it."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def _kinds(groups: Sequence[dict[str, Any]], make: Callable[..., Optimizer]) -> dict[str, bool]:
    """Returns key -> whether its value is elementwise (True) or one number (False)."""
    kinds: dict[str, bool] = {}
    for group in groups:
        parameter = Parameter(torch.ones(2, 3))
        parameter.grad = torch.ones(2, 3)
        try:
            settings = {k: v for k, v in group.items() if k not in (*IMPLEMENTATIONS, "params")}
            optimizer = told_to_train(make([{**settings, "params": [parameter]}]))
            optimizer.step()
        except Exception:  # wants a closure, other tensors: nothing is known
            continue
        for key, value in optimizer.state[parameter].items():
            shape = value.shape if isinstance(value, Tensor) else None
            if shape == parameter.shape or shape == ():
                kinds[key] = shape == parameter.shape
    return kinds


def _check(key: str, value: Any, parameter: Tensor, name: str, elementwise: bool | None) -> None:
    shape = list(value.shape) if isinstance(value, Tensor) else None
    if elementwise:
        fits = value is None or shape == list(parameter.shape)
    else:
        fits = elementwise is None or shape in (None, [])
    if not fits:
        is_now = type(value).__name__ if shape is None else shape
        wanted = "one of its shape" if elementwise else "one number"
        raise ValueError(
            f"load_state_dict: the optimizer's state is of another network: {key} is {is_now} for "
            f"a parameter {list(parameter.shape)}, {name}, in place of {wanted}"
        )


def load(parts: Sequence[Part], found: Entries) -> None:
    """Gives each part its pieces of whole values, in the dtype of the slice that is stepped.

    That of the network's parameter may be another one, as with `fsdp`'s `param_dtype`.
    """
    values_of = dict(found.values())
    for part in parts:
        state = {}
        for number, (unit, piece, _) in enumerate(part.pieces):
            parameter = unit.parameters[piece.member]
            if (values := values_of.get(parameter)) is not None:
                state[number] = {k: _cut(k, x, parameter, piece) for k, x in values.items()}
        part.optimizer.load_state_dict({**part.optimizer.state_dict(), "state": state})


def _cut(key: str, value: Any, parameter: Parameter, piece: Piece) -> Any:
    """Returns a piece's part of a whole value of a parameter's state, a copy."""
    if not isinstance(value, Tensor):
        return value
    if _is_number(key, value, parameter):
        return value.clone()
    return piece.of_parameter(value.contiguous()).clone()


def _is_number(key: str, value: Tensor, parameter: Tensor) -> bool:
    return key == "step" or (value.dim() == 0 and parameter.dim() > 0)


def gather_states(parts: Sequence[Part]) -> defaultdict[Tensor, Any]:
    """Returns the state of all ranks under the network's parameters; a collective call."""
    units = [unit for part in parts for unit in part.units]
    parameters = [parameter for unit in units for parameter in unit.parameters]
    number_of = {parameter: number for number, parameter in enumerate(parameters)}
    own = {
        (number_of[parameter], key): value
        for part in parts
        for parameter, values in part.states()
        for key, value in values.items()
    }
    pieces: dict[tuple[int, str], list[Any]] = {}  # a value's, of the ranks in order
    for theirs in gather(own, units[0].group, units[0].shard.device):
        for place, piece_of_value in theirs.items():
            pieces.setdefault(place, []).append(piece_of_value)
    whole: defaultdict[Tensor, Any] = defaultdict(dict)
    for number, key in sorted(pieces, key=itemgetter(0)):
        found, parameter = pieces[number, key], parameters[number]
        is_cut = isinstance(found[0], Tensor) and key != "step" and found[0].dim() > 0
        whole[parameter][key] = torch.cat(found).view(parameter.shape) if is_cut else found[0]
    return whole
