"""The tensors of a checkpoint and those of a run: each by its name, laid out as its ranks need it.

An optimizer numbers its parameters, and a run whose groups list them in another order has other
numbers. So the optimizer's state is stored by name. It is taken by `state_dict()` and renamed here,
because torch's own `get_optimizer_state_dict` takes a step with an optimizer without state, which
would change the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.checkpoint.file_format import MODULE, OPTIMIZER
from dp_clipping.checkpoint.run import PrivateRun
from dp_clipping.distributed import dtensor
from dp_clipping.distributed.placement import box_of, slices_of

State = dict[str, Any]


def is_sharded(run: PrivateRun) -> bool:
    """Returns whether the model's parameters lie in parts on several ranks. Every rank calls it."""
    return any(dtensor.is_sharded(x) for x in run.model.network.state_dict(keep_vars=True).values())


def names_of(run: PrivateRun) -> dict[nn.Parameter, str]:
    """Returns the names of the parameters in shards, as the optimizer holds them."""
    network = run.model.network
    network.state_dict()  # FSDP2 puts back into parts what a forward has left gathered
    return {parameter: name for name, parameter in network.named_parameters()}


def by_name(run: PrivateRun) -> State:
    """Returns the optimizer's state with names of parameters for their numbers."""
    names, state = names_of(run), run.optimizer.state_dict()
    name_of = {}
    for here, group in zip(run.optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(here["params"], group["params"], strict=True):
            name_of[number] = names[parameter]
    parameters = {name: parameter for parameter, name in names.items()}
    for number, values in state["state"].items():
        name = name_of[number]
        for key, x in values.items():
            if dtensor.is_sharded(x) and not _lies_like(x, parameters[name]):
                raise ValueError(
                    f"the optimizer's {key} of {name} is sharded otherwise than {name} itself: "
                    "checkpoints of this optimizer's sharded state are not supported"
                )
    return {
        "state": {name_of[number]: dict(values) for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _lies_like(x: Any, parameter: Tensor) -> bool:
    return (
        dtensor.is_sharded(parameter)
        and x.shape == parameter.shape
        and (x.device_mesh, x.placements) == (parameter.device_mesh, parameter.placements)
    )


def take_tensors(contents: State) -> dict[str, Tensor]:
    """Takes the tensors of module and optimizer out of `contents`, by a name for each."""
    tensors = {}
    for name, x in contents[MODULE].items():
        if isinstance(x, Tensor):
            tensors[f"{MODULE}.{name}"] = x.detach()
    rest = {name: x for name, x in contents[MODULE].items() if not isinstance(x, Tensor)}
    contents[MODULE] = rest
    if OPTIMIZER in contents:
        for name, values in contents[OPTIMIZER]["state"].items():
            for key in [key for key, x in values.items() if isinstance(x, Tensor)]:
                tensors[f"{OPTIMIZER}.{name}.{key}"] = values.pop(key).detach()
    return tensors


def check_part(run: PrivateRun, name: str, x: Tensor) -> None:
    """Raises ValueError if torch would read or write a part at a wrong place.

    Where several axes divide a dimension unevenly, torch may assume that a part lies where another
    one does.
    """
    if not dtensor.is_sharded(x):
        return
    if run.group is None:
        raise ValueError(
            f"{name} is sharded, but this run's ranks have no common group: grad_sample_mode "
            f"{run.settings['mode']!r} has no checkpoints of sharded models"
        )
    believed = [
        tuple(zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in x.__create_chunk_list__()
        if chunk.sizes.numel()
    ]
    if believed != [box_of(x)] * (x.to_local().numel() > 0):
        raise ValueError(
            f"{name} {list(x.shape)} is cut unevenly by several axes of the mesh, and torch "
            f"{torch.__version__} would take its parts for others: choose sizes that divide"
        )


def with_tensors(saved: State, tensors: Mapping[str, Tensor]) -> State:
    """Returns the entries with the tensors back in their places; `saved` is left as it is."""
    module, whole = dict(saved[MODULE]), dict(saved)
    whole[MODULE] = module
    state = {}
    if OPTIMIZER in saved:
        state = {name: dict(values) for name, values in saved[OPTIMIZER]["state"].items()}
        whole[OPTIMIZER] = {**saved[OPTIMIZER], "state": state}
    for full_name, x in tensors.items():
        entry, name = full_name.split(".", 1)
        if entry == MODULE:
            module[name] = x
        elif OPTIMIZER in saved:
            parameter, key = name.rsplit(".", 1)
            state.setdefault(parameter, {})[key] = x
    return whole


def check_groups(run: PrivateRun, saved: State, path: Path) -> None:
    """Checks that the optimizer's groups hold the same parameters, in any order within one."""
    if OPTIMIZER not in saved:
        return
    names = names_of(run)
    groups = zip(saved[OPTIMIZER]["param_groups"], run.optimizer.param_groups, strict=True)
    for number, (there, here) in enumerate(groups):
        differing = {*there["params"]} ^ {names[parameter] for parameter in here["params"]}
        if differing:
            raise ValueError(
                f"{path}: group {number} of the optimizer holds {min(differing)} in only one of "
                "the checkpoint and this run: resume with the groups of the saved run"
            )


def room_for(run: PrivateRun, saved: State, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocates this rank's part of each tensor to load, laid out as the run's."""
    models = _models(run)
    room = {}
    for full_name, x in known.items():
        entry, name = full_name.split(".", 1)
        if entry == OPTIMIZER and OPTIMIZER not in saved:
            continue
        model = models.get(name if entry == MODULE else name.rsplit(".", 1)[0])
        if entry == MODULE and model is None:
            continue  # known to be missing, and allowed by strict=False
        if model is not None and model.shape == x.shape and (x.dim() or entry == MODULE):
            room[full_name] = torch.empty_like(model, dtype=x.dtype, requires_grad=False)
        elif entry == OPTIMIZER:
            room[full_name] = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        else:
            raise ValueError(
                f"{name} is {list(x.shape)} in the checkpoint and {list(model.shape)} in this model"
            )
        check_part(run, name, room[full_name])
    return room


def _models(run: PrivateRun) -> dict[str, Tensor]:
    """Returns tensors by name whose shape and layout those of a checkpoint get."""
    state = run.model.network.state_dict()
    named = {name: parameter for parameter, name in names_of(run).items()}
    return {name: x for name, x in state.items() if isinstance(x, Tensor)} | named


def lay_out(run: PrivateRun, saved: State) -> State:
    """Returns the entries of a one-file checkpoint, each rank with its parts of what it shards."""
    models = _models(run)
    module = {
        name: _part_of(x, models[name]) if name in models else x
        for name, x in saved[MODULE].items()
    }
    laid = {**saved, MODULE: module}
    if OPTIMIZER in saved:
        numbers = [n for group in saved[OPTIMIZER]["param_groups"] for n in group["params"]]
        parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        model_of = dict(zip(numbers, parameters, strict=True))
        state = {
            number: {key: _part_of(x, model_of[number]) for key, x in values.items()}
            for number, values in saved[OPTIMIZER]["state"].items()
        }
        laid[OPTIMIZER] = {**saved[OPTIMIZER], "state": state}
    return laid


def _part_of(x: Any, model: Tensor) -> Any:
    """Returns a whole tensor as the sharded `model` has it, if they have a shape in common."""
    if not isinstance(x, Tensor) or not dtensor.is_sharded(model) or x.shape != model.shape:
        return x
    from torch.distributed.tensor import DTensor

    part = x[slices_of(model)].to(model.device).contiguous()
    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=x.shape,
        stride=model.stride(),
    )  # fmt: skip


def by_number(run: PrivateRun, state: State) -> State:
    """Converts an optimizer state of `by_name` back to this run's parameter numbers."""
    names = names_of(run)
    groups, number_of = [], {}
    for here, group in zip(run.optimizer.param_groups, state["param_groups"], strict=True):
        numbers = range(len(number_of), len(number_of) + len(here["params"]))
        number_of |= {names[p]: n for p, n in zip(here["params"], numbers, strict=True)}
        groups.append({**group, "params": list(numbers)})
    values_of = {number_of[name]: values for name, values in state["state"].items()}
    return {"state": dict(sorted(values_of.items())), "param_groups": groups}
