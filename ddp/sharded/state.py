"""Whole states of an optimizer: gathers one from the ranks' pieces, checks and cuts one to load.

A whole state is what `state_dict()` of the optimizer returns on one process, so that it moves
between numbers of ranks and to and from a plain optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.sharded.layout import FlatUnit, Piece

Part = tuple[FlatUnit, list[tuple[Piece, Parameter]], Optimizer]
"""A unit, this rank's pieces of it with the parameter that is stepped for each, and by which."""

IMPLEMENTATIONS = ("capturable", "foreach", "fused")
SHOWN = 8  # names in a message

Entries = dict[int, tuple[Parameter, dict[str, Any]]]
"""Number in a state -> the parameter that has it, and its values."""


def entries(
    state_dict: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    names: dict[Parameter, str],
    make: Callable[..., Optimizer],
) -> Entries:
    """Returns the entries of a whole state, checked, with the parameters they belong to.

    Args:
        groups: the parameter groups of the optimizer that loads it.
        names: of its parameters.
        make: makes another optimizer of its kind, from parameter groups.

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
                _check(key, value, parameter, names[parameter], kinds.get(key))
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


def cut(key: str, value: Any, parameter: Parameter, piece: Piece | None) -> Any:
    """Returns a piece's part of a whole value of a parameter's state, a copy.

    Raises:
        ValueError: if it has neither the parameter's shape nor a single element.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "step" or (value.dim() == 0 and parameter.dim() > 0):
        return value.clone()
    if value.shape != parameter.shape:
        raise ValueError(
            f"load_state_dict: the optimizer's state is of another network: {key} is "
            f"{list(value.shape)} for a parameter {list(parameter.shape)}"
        )
    return None if piece is None else value.reshape(-1)[piece.offset :][: piece.numel].clone()


def gather(parts: Sequence[Part]) -> defaultdict[Tensor, Any]:
    """Returns the state of all ranks under the network's parameters; a collective call."""
    whole: defaultdict[Tensor, Any] = defaultdict(dict)
    for unit, own, inner in parts:
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
