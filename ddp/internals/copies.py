"""Copies and pickles a wrapper.

Hooks, handles and buckets belong to one wrapper. So a copy (`copy.deepcopy`, `torch.save(model)`,
`AveragedModel(model)`) is built anew from the copied network and the same options. Building it
communicates nothing: one rank alone may copy.
"""

import copy
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch import nn

COPYING: ContextVar[bool] = ContextVar("COPYING", default=False)
"""True while a copy is built, whose parameters are equal on all ranks already."""


def deep_copy(wrapper: Any, memo: dict) -> Any:
    memo[id(wrapper.process_group)] = wrapper.process_group  # the ranks stay the same
    new = memo[id(wrapper)] = build(type(wrapper), copy.deepcopy(_state(wrapper), memo))
    return new


def reduced(wrapper: Any) -> tuple[Any, ...]:
    """Returns what `__reduce__` returns.

    Raises:
        RuntimeError: if the process group is not the default one, which a file cannot hold.
    """
    if wrapper.process_group is not dist.group.WORLD:
        raise RuntimeError(
            "a wrapper whose process_group is not the default one cannot be pickled: save "
            "model.module or model.state_dict(), and wrap again after loading"
        )
    state = _state(wrapper)
    state["options"]["process_group"] = None
    return build, (type(wrapper), state)


def build(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    """Returns a wrapper in the state of another one, made from a copy of its network."""
    token = COPYING.set(True)
    try:
        new = cls(state["attributes"]["_modules"]["module"], **state["options"])
    finally:
        COPYING.reset(token)
    vars(new).update(state["attributes"])
    new.gradient_dtype = state["gradient_dtype"]
    return new


def _state(wrapper: Any) -> dict[str, Any]:
    """Returns the options, which are attributes of the same name, and what every nn.Module has."""
    options = [name for name in type(wrapper).options if hasattr(wrapper, name)]
    return {
        "options": {name: getattr(wrapper, name) for name in options},
        "attributes": {name: vars(wrapper)[name] for name in vars(nn.Module())},
        "gradient_dtype": wrapper.gradient_dtype,
    }
