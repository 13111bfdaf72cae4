"""Whole states of an optimizer: gathers one from the ranks' pieces, checks and cuts one to load.

A whole state is what `state_dict()` of the optimizer returns on one process, so that it moves
between numbers of ranks and to and from a plain optimizer.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp.internals.states import gather
from ddp.sharded.layout import FlatUnit
from ddp.sharded.slices import Piece, Slices

Entries = dict[int, tuple[Parameter, dict[str, Any]]]
"""Number in a state -> the parameter that has it, and its values."""


def entries(
    state_dict: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    names: dict[Parameter, str],
) -> Entries:
    """Returns the entries of a whole state, checked, with the parameters they belong to.

    Args:
        groups: the parameter groups of the optimizer that loads it.
        names: of its parameters.

    Raises:
        ValueError: for an entry of no parameter, and for values that are neither one number nor of
            their parameter's shape.
    """
    saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    mine = list(chain.from_iterable(group["params"] for group in groups))
    parameter_of = dict(zip(saved, mine, strict=False))  # torch compares their numbers later
    state = state_dict["state"]
    if unknown := [number for number in state if number not in set(saved)]:
        raise ValueError(
            f"load_state_dict: the state has values of parameters {unknown}, which are in none of "
            "its param_groups"
        )
    found = {n: (parameter_of[n], values) for n, values in state.items() if n in parameter_of}
    for parameter, values in found.values():
        for key, value in values.items():
            if isinstance(value, Tensor) and not _fits(key, value, parameter):
                raise ValueError(
                    f"load_state_dict: the optimizer's state is of another network: {key} is "
                    f"{list(value.shape)} for a parameter {list(parameter.shape)}, "
                    f"{names.get(parameter, 'frozen')}"
                )
    return found


def _fits(key: str, value: Tensor, parameter: Tensor) -> bool:
    if key == "step":
        return value.numel() == 1
    return value.dim() == 0 or value.shape == parameter.shape


def load(slices: Slices, found: Entries) -> None:
    """Gives pieces their part of whole values, in the dtype of the slice that is stepped.

    That of the network's parameter may be another one, as with `fsdp`'s `param_dtype`.
    """
    values_of, state = dict(found.values()), {}
    for number, piece in enumerate(slices.stepped):
        if (values := values_of.get(piece.parameter)) is not None:
            state[number] = {k: _cut(k, x, piece) for k, x in values.items()}
    slices.optimizer.load_state_dict({**slices.optimizer.state_dict(), "state": state})


def _cut(key: str, value: Any, piece: Piece) -> Any:
    """Returns a piece's part of a whole value of its parameter's state, a copy."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or (value.dim() == 0 and piece.parameter.dim() > 0):  # one number
        return value.clone()
    return value.reshape(-1)[piece.of_whole].clone()


def states(slices: Slices) -> dict[Parameter, dict[str, Any]]:
    """Returns the state of each piece that has one, under the network's parameter."""
    state = slices.optimizer.state
    return {p.parameter: state[own] for p, own in slices.stepped.items() if own in state}


def gather_states(units: Sequence[FlatUnit], slices: Slices) -> defaultdict[Tensor, Any]:
    """Returns the state of all ranks under the network's parameters; a collective call."""
    parameters = [parameter for unit in units for parameter in unit.parameters]
    number_of = {parameter: number for number, parameter in enumerate(parameters)}
    held = states(slices).items()
    own = {(number_of[p], key): value for p, values in held for key, value in values.items()}
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
