"""Methods of `fsdp` that take no part in a step: whole parameters, checkpoints, agreements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.nn import Parameter

from ddp.sharded.base import Sharded
from ddp.sharded.internals.agreement import agree
from ddp.sharded.internals.call_order import Progress
from ddp.sharded.torch_compat import in_transform
from ddp.sharded.units import Block, wait_for
from ddp.torch_compat import in_backward, own_parameters

IN_TRANSFORM = (
    "a forward of a network that fsdp has divided, inside of a transform of torch.func, where it "
    "cannot gather parameters: call the transform inside of `with model.whole_parameters():`"
)
INSIDE = (
    "{what} inside of whole_parameters(), where other tensors are in the network: take them from "
    "model.parameters() inside of it"
)
IN_BACKWARD = (
    "{what} in a backward, where fsdp has freed the parameter: call it behind "
    "finish_gradient_synchronization()"
)
ON_ONE_RANK = (
    "outside of its block's forward each use of a parameter is a call of all ranks: to look at "
    "parameters on one rank, let all enter `with model.whole_parameters():`"
)


class DividedInterface(Sharded):
    """A network whose parameters are whole in some blocks at a time.

    Attributes:
        blocks: all of them; the first is the network itself, which has what is in no other.
        is_whole: inside of `whole_parameters`, where a forward communicates nothing.
    """

    blocks: list[Block]
    progress: Progress
    is_whole: bool = False
    _param_dtype: torch.dtype | None

    start: Callable[[Block], None]  # of fsdp.py

    def free(self) -> None:
        """Frees the parameters of all blocks."""
        for block in self.blocks:
            block.free()
        self.progress.is_ahead = False

    # ---- what ranks tell each other ------------------------------------------------------------

    def agree(self, act: str) -> None:
        """Returns once all ranks are about to do the same; an error says what may have happened."""
        agree(lambda mine: self.exchange(mine, wait_for), act)

    def agree_on_forward(self, act: str) -> None:
        """Returns once all ranks begin such a forward; others may be in a step or evaluate."""
        if in_transform():
            raise RuntimeError(IN_TRANSFORM)
        self.end_calls()
        self.progress.way_back.complete(self.start)
        if not self.progress.is_ahead:
            self.free()
        self.agree(act)
        self.progress.has_agreed = True

    def end_calls(self) -> None:
        for block in self.blocks:
            block.computes = False

    def before_use(self, what: str) -> None:
        """Called before a function gathers whole values of stand-ins, on all ranks."""
        if self.is_whole:
            raise RuntimeError(INSIDE.format(what=what))
        if in_backward():  # where ranks may have come to different places
            raise RuntimeError(IN_BACKWARD.format(what=what))
        try:
            self.agree(what)
        except RuntimeError as error:
            error.add_note(ON_ONE_RANK)
            raise

    # ---- whole parameters ----------------------------------------------------------------------

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Enters a context with whole parameters in the network; changes of them are kept.

        They are other tensors than those of training, in the dtype of the slices. A collective
        call; inside, one rank alone may call the network, and enter another one.
        """
        if self.is_whole:
            yield
            return
        self.free()
        units = [unit for block in self.blocks for unit in block.units]
        whole: dict[Parameter, Parameter] = {}
        for unit in units:
            for p, value in zip(unit.parameters, unit.gather(unit.shard), strict=True):
                whole[p] = Parameter(value, requires_grad=p.requires_grad)
        places = [
            (module, name, p)
            for module in self.module.modules()
            for name, p in own_parameters(module).items()
            if p in whole  # none that was added to the network since
        ]
        try:
            self.is_whole = True
            for module, name, p in places:
                setattr(module, name, whole[p])
            yield
            with torch.no_grad():
                for unit in units:
                    unit.keep({m: whole[p] for m, p in enumerate(unit.parameters)})
        finally:
            for module, name, p in places:
                setattr(module, name, p)
            self.is_whole = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole state, on every rank. A collective call."""
        with self.whole_parameters():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's slices of a whole state, which must be the same on every rank.

        Raises:
            ValueError: for `assign=True`.
            RuntimeError: inside of `whole_parameters`, and for a state that does not fit; the
                parameters stay as they were.
        """
        if assign:
            raise ValueError("load_state_dict: a rank keeps slices of its own, give assign=False")
        if self.is_whole:
            raise RuntimeError("load_state_dict: leave whole_parameters() first, on all ranks")
        with self.whole_parameters():
            return super().load_state_dict(state_dict, strict=strict)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a network that fsdp has divided cannot be copied or pickled, because this rank has "
            "slices of it only: save model.state_dict() on one rank, after calling it on all"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._param_dtype is not None and self.gradient_dtype is None:
            self.gradient_dtype = torch.float32  # of what adds up, in place of `param_dtype`
        with super().no_sync():
            yield
