"""Copies, pickles, loads and describes a wrapper; everything beside its training.

Hooks, handles and buckets belong to one wrapper. So a copy (`copy.deepcopy`, `torch.save(model)`,
`AveragedModel(model)`) is built anew from the copied network and the same options. Building it
communicates nothing: one rank alone may copy.
"""

import copy
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from ddp.internals.dtypes import give_back
from ddp.internals.gradients import Gradients, Reduction
from ddp.internals.hooks import AutogradHooks
from ddp.internals.optimizer import Replicated
from ddp.internals.ownership import enter
from ddp.internals.step import Launch, Step
from ddp.internals.watch import Watch
from ddp.schedule import Schedule


class Copyable:
    """A wrapper that can be copied and pickled; `__init__` must not communicate if `is_copy`."""

    is_copy: bool = False
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
        """Returns the state to pickle.

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
        self.__dict__.update(is_copy=True, _options=state["options"])
        self.__init__(attributes["_modules"]["module"], **state["options"])
        self.__dict__.update(attributes)
        self.reduce, self.gradient_dtype = state["reduce"], state["gradient_dtype"]


class Wrapper(Replicated, Copyable):
    """The methods of `ddp.base.DataParallel` that take no part in a step."""

    gradients: Gradients
    schedule: Schedule
    step: Step
    watch: Watch

    reduction_type: ClassVar[type[Reduction]] = Reduction

    is_active: bool = True
    """False while another wrapper of the same network is in use: see ownership.py."""

    def describe_gradients(self) -> Gradients:
        """Called at construction, once all ranks hold the same values."""
        return Gradients(self.module, self.reduction)

    def register_hooks(self) -> None:
        enter(self, AutogradHooks(self, self.step.backward), self.gradients)

    def may_launch(self) -> bool:
        """Returns whether the next bucket, once complete, is launched now; or later, if not."""
        return True

    def agree(self) -> None:
        """Called on all ranks at the end of the first step, before the plan is rebuilt."""

    def count(self, collectives: int, nbytes: int) -> None:
        """Adds to what `stats` returns; a variant calls it in `launch`."""
        self.step.record.collectives += collectives
        self.step.record.nbytes += nbytes

    def stats(self) -> dict[str, int]:
        """Returns the collectives and bytes of this rank's last finished step.

        `collectives` started, `bytes` of gradients handed to them (an all-reduce in a ring moves
        2(W-1)/W times as many over each link) and of gathered parameters, and `buckets` in the
        plan.
        """
        record = self.step.finished
        return {
            "collectives": record.collectives, "bytes": record.nbytes, "buckets": record.buckets
        }  # fmt: skip

    def launches(self) -> list[Launch]:
        """Returns the launches of the last finished step on this rank, in order."""
        return [
            Launch(ready, nbytes, tuple(self.gradients.name(i) for i in bucket.members))
            for ready, nbytes, bucket in self.step.finished.launches
        ]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self.watch.accept_changes()
        return result

    def is_in_mid_step(self) -> bool:
        """Returns whether gradients have arrived, or were launched, that are not finished."""
        return self.step.is_in_the_middle()

    def deactivate(self) -> None:
        """Discards an unfinished step because another wrapper of this network takes over."""
        self.wait_for(*self.schedule.in_flight)
        self.step.begin()
        give_back(self.gradients.dtypes.given)
        self.is_active = False
