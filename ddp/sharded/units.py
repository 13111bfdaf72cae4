"""The memory of a block's parameters, which comes and goes.

A parameter is the same object for the whole of training. Where nothing computes with it, it is a
stand-in without values (internals/divided.py). While a module computes with it, it is a view of a
flat buffer with the values of all ranks; what is written there meanwhile is kept when the buffer is
freed.

The buffer's storage is resized, never replaced: autograd saves views of it for backward, such as
the transposed weight of a linear layer, and these must see the values that a later gather writes.
That is no change in autograd's eyes, because a parameter counts its own writes, not its buffer's.

On a GPU the memory is allocated, used and given back on the stream that computes. A gather starts
behind what is queued on that stream, and the stream waits for it before the memory is used or given
back. So no other stream has to be told about it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.sharded.internals.divided import (
    Place,
    Values,
    hide_all,
    memory_of,
    reveal_all,
    take_replaced,
)
from ddp.sharded.layout import FlatUnit
from ddp.sharded.torch_compat import refuse_writes
from ddp.torch_compat import all_gather, version_of

NOT_TOGETHER = (
    "the {what} of {name} has failed. With fsdp each forward and backward is a call of all ranks, "
    "and another rank has not made it: it has ended, failed, left its loop earlier, returned from "
    "its forward before this block, or evaluates alone. Take the same steps on all ranks and call "
    "the same blocks in them; to evaluate on one rank, let all enter `with "
    "model.whole_parameters():`. After an error start all ranks again, from a checkpoint"
)


def wait_for(work: Any, what: str = "gather", block: str = "") -> None:
    """Waits for a collective of a block; an error of it says in a note what may have happened."""
    try:
        work.wait()
    except RuntimeError as error:
        error.add_note(NOT_TOGETHER.format(what=what, name=block or "what is in no block"))
        raise


class GatheredUnit(FlatUnit):
    """Parameters that lie in one flat buffer, which has memory while a module computes with them.

    Attributes:
        shard: this rank's slice of the values, in the dtype that the parameters had.
        name: that of its block; "" if it belongs to none.
        computes: its block's forward is running, so that it is not freed.
        was_called: code of a forward has run since it was gathered, and may have written to it.
        replaced: how often each stand-in got other `.data`.
        is_shown: the parameters are whole: views of the values, of which `places` has the names.
        before_use: weakly, what is called before whole values of stand-ins are gathered, with what
            they are for.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        name: str = "",
        names: Sequence[str] = (),
    ):
        super().__init__(parameters, group, itemsize=dtype.itemsize)
        self.name, self.computes, self.has_memory, self.is_shown = name, False, False, False
        self.was_called, self._versions, self.memory = False, [0], [0]
        self.is_trainable = self.parameters[0].requires_grad
        self.before_use: Callable[[], Callable[[str], None] | None] = lambda: None
        self.replaced = [0] * len(self.parameters)
        self._work: dist.Work | None = None
        flat = self.flatten()
        self.shard = self.own(flat).clone()
        self.values = torch.empty_like(flat, dtype=dtype)
        self.value_views, self._own = self.views(self.values), self.own(self.values)
        self.values.untyped_storage().resize_(0)
        myself: weakref.ref[Values] = weakref.ref(self)
        names = names or [f"a parameter {list(p.shape)}" for p in self.parameters]
        self.places = [Place(myself, member, own) for member, own in enumerate(names)]
        nothing = torch.full((), torch.nan if dtype.is_floating_point else 0, device=flat.device)
        self._nothing = nothing.to(dtype)  # all that C++ sees of stand-ins
        refuse_writes(self._nothing)
        for parameter in self.parameters:
            parameter.grad = None
        self._hide()
        stale = self.parameters, self.places, self._nothing  # once this has gone
        weakref.finalize(self, hide_all, *stale).atexit = False

    def start(self) -> None:
        """Allocates the memory of the values, and starts to gather them."""
        self.has_memory = True
        self.values.untyped_storage().resize_(self.values.nbytes)
        self._work = all_gather(self.values, self._own.copy_(self.shard), self.group)

    def wait(self) -> None:
        """Makes the parameters whole, for later work of the current stream."""
        if self._work is not None:
            self._wait_for_values()
        if not self.is_shown:
            self.is_shown = True
            reveal_all(self.parameters, self.places, self.value_views)
            self._versions = list(map(version_of, self.parameters))
            self.memory = memory_of(self.parameters)

    def free(self) -> None:
        """Makes the parameters stand-ins and frees their memory, unless a forward computes."""
        if self.has_memory and not self.computes:
            if self._work is not None:
                self._wait_for_values()
            if self.is_shown:
                are_replaced = take_replaced([self])
                versions = list(map(version_of, self.parameters))
                if self.was_called or are_replaced or self._versions != versions:
                    from ddp.sharded.internals.written import take_written  # imports Triton

                    take_written(self._own, self.shard)
                    self.was_called = False
                self._hide()
            self.has_memory = False
            self.values.untyped_storage().resize_(0)

    def _wait_for_values(self) -> None:
        work, self._work = self._work, None
        wait_for(work, "gather", self.name)

    def _hide(self) -> None:
        self.is_shown = False
        hide_all(self.parameters, self.places, self._nothing)

    # ---- what is written to parameters ---------------------------------------------------------

    def whole(self) -> list[Tensor]:
        """Returns copies of the parameters from every rank's slice; a collective call."""
        return self.gather(self.shard)

    @torch.no_grad()
    def keep(self, whole: dict[int, Tensor]) -> None:
        """Makes whole tensors the values of some parameters: this rank keeps what it owns."""
        for piece in self.pieces:
            if (value := whole.get(piece.member)) is not None:
                piece.of(self.shard).copy_(piece.of_parameter(value.contiguous()))
        self.free()  # what was gathered before


class Block:
    """A module whose parameters are gathered just before it computes.

    Attributes:
        name: its name in the network; "" is the network itself, which has the rest.
        units: its parameters, by dtype and whether they are trained.
        around: the block itself and those that contain it, but not the network.
        computes: its forward is running.
    """

    def __init__(self, name: str, module: nn.Module, units: list[GatheredUnit]):
        self.name, self.module, self.units = name, module, units
        self.around: list[Block] = []
        self.computes = False

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def call(self) -> None:
        """Notes that its forward is about to run."""
        for unit in self.units:
            unit.was_called = True

    def end(self) -> None:
        """Notes that its forward has ended, which may have given parameters other `.data`."""
        self.computes = False
        take_replaced(self.units)

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    @property
    def computes(self) -> bool:
        return self._computes

    @computes.setter
    def computes(self, value: bool) -> None:
        self._computes = value
        for unit in self.units:
            unit.computes = value
