"""Saves and loads a round of `diloco` with the state of its optimizers, and checks its options.

In the middle of a round each rank has parameters of its own, and always an optimizer's state of its
own. `optimizer.state_dict()` has those of all ranks, so that as many ranks go on exactly where it
was saved:

    state, param_groups     what a plain optimizer has; the state is that of rank 0
    diloco.steps            local steps in this round
    diloco.start, momentum  by parameter, as in `state`; `start` in the middle of a round only
    diloco.ranks            the state of each rank, and its parameters where there is a `start`

On another number of ranks, rank r goes on with what rank r had, counted around.
"""

import copy
from itertools import chain
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddp.internals.states import gather

PARAMETER = "diloco parameter"  # a rank's own, among its state


@torch.no_grad()
def save(wrapper: Any, number: int, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Adds to an optimizer's state the round, and what each rank has; a collective call.

    What a plain optimizer would load is rank 0's: the same on every rank, on the CPU.
    """
    own = {(k, key): x for k, values in state["state"].items() for key, x in values.items()}
    indices = {k: i for k, i in enumerate(indices_of(wrapper, optimizer)) if i >= 0}
    parameters, shared = wrapper.gradients.parameters, {}
    for name, tensors in (("start", wrapper.start), ("momentum", wrapper.momentum)):
        held = indices if tensors else {}
        shared[name] = {k: tensors[i].to("cpu", copy=True) for k, i in held.items()}
    if wrapper.start:
        own |= {(k, PARAMETER): parameters[i] for k, i in indices.items()}
    ranks: list[dict[int, dict[str, Any]]] = []
    for theirs in gather(own, wrapper.process_group, parameters[0].device):
        ranks.append({})
        for (k, key), value in theirs.items():
            ranks[-1].setdefault(k, {})[key] = value
    state["diloco"] = {"steps": wrapper.counts[number], "ranks": ranks, **shared}
    state["state"] = _of_optimizer(ranks[0])


@torch.no_grad()
def load(wrapper: Any, number: int, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Takes the round out of a state, and what this rank had; of another number, one of them.

    The state of another variant, or of a plain optimizer, begins a round without momentum.

    Raises:
        ValueError: if it is that of another network; nothing is changed then.
    """
    saved = [k for group in state["param_groups"] for k in group["params"]]
    indices = indices_of(wrapper, optimizer)
    if len(saved) != len(indices):
        return state  # which PyTorch refuses
    index_of = dict(zip(saved, indices, strict=True))
    begun = {"steps": 0, "ranks": [state["state"]], "start": {}, "momentum": {}}
    found = state.get("diloco", begun)
    mine = found["ranks"][dist.get_rank(wrapper.process_group) % len(found["ranks"])]
    values = {k: own[PARAMETER] for k, own in mine.items() if PARAMETER in own}
    parameters = wrapper.gradients.parameters
    for k, value in chain(*(x.items() for x in (values, found["start"], found["momentum"]))):
        if value.shape != parameters[index_of[k]].shape:
            raise ValueError(
                "load_state_dict: the optimizer's state is of another network: it has "
                f"{list(value.shape)} for {wrapper.gradients.names[index_of[k]]} "
                f"{list(parameters[index_of[k]].shape)}"
            )
    wrapper.counts[number], wrapper.start = found["steps"], wrapper.start if found["start"] else []
    if found["start"]:
        wrapper.begin_round()
    wrapper.momentum = wrapper.momentum or [torch.zeros_like(p) for p in parameters]
    for k, i in index_of.items():
        if i >= 0:
            wrapper.momentum[i].copy_(found["momentum"].get(k, torch.zeros((), device="cpu")))
            if k in values:
                wrapper.start[i].copy_(found["start"][k])
                parameters[i].copy_(values[k])
    wrapper.watch.accept_changes()
    return {**state, "state": copy.deepcopy(_of_optimizer(mine))}  # not shared with the file


def indices_of(wrapper: Any, optimizer: Optimizer) -> list[int]:
    """Returns the index of each of an optimizer's parameters, in the order of its state."""
    groups = optimizer.param_groups
    return [wrapper.gradients.index_of(p) for group in groups for p in group["params"]]


def _of_optimizer(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns a rank's state without its parameters."""
    found = {k: {key: x for key, x in own.items() if key != PARAMETER} for k, own in state.items()}
    return {k: own for k, own in found.items() if own}


def check(every: int, outer_lr: float, outer_momentum: float) -> None:
    """Raises ValueError for an option that is wrong."""
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every: {every} is not a number of steps, give 1 or more")
    if not 0 < outer_lr < inf:
        raise ValueError(f"outer_lr: {outer_lr} is not a positive finite number")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum: {outer_momentum} is not below 1, nor 0 for none")
