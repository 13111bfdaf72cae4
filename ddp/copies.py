"""Copies of a wrapped network: `copy.deepcopy`, `torch.save(model)`, `AveragedModel(model)`.

Hooks, handles and buckets belong to one wrapper, so a copy is made from what a wrapper was built
with: the copied network and the same options. Building it communicates nothing: one rank alone may
copy.
"""

import copy
from typing import Any

import torch.distributed as dist
from torch import nn


class Copyable:
    """A wrapper that can be copied and pickled; `__init__` must not communicate if `_is_copy`."""

    _is_copy: bool = False
    _options: dict[str, Any]

    def __new__(cls, *_module: nn.Module, **options):
        self = super().__new__(cls)
        options.pop("module", None)
        self.__dict__["_options"] = options
        return self

    def __deepcopy__(self, memo: dict) -> "Copyable":
        memo[id(self.process_group)] = self.process_group  # the ranks stay the same
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self._state(self._options), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled.

        Raises:
            RuntimeError: if the process group is not the default one, which a file cannot hold.
        """
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "a wrapper whose process_group is not the default one cannot be pickled: save "
                "model.module or model.state_dict(), and wrap again after loading"
            )
        return self._state({**self._options, "process_group": None})

    def _state(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "options": options,
            "reduce": self.reduce,
            "gradient_dtype": self.gradient_dtype,
            "nn.Module": {name: self.__dict__[name] for name in vars(nn.Module())},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = state["nn.Module"]
        self.__dict__.update(_is_copy=True, _options=state["options"])
        self.__init__(attributes["_modules"]["module"], **state["options"])
        self.__dict__.update(attributes)
        self.reduce, self.gradient_dtype = state["reduce"], state["gradient_dtype"]
