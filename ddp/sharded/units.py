"""The memory of a block's parameters, which comes and goes.

A parameter is the same object for the whole of training. While a module computes with it, it is a
view of a flat buffer with the values of all ranks; otherwise it is a stand-in without values, and
the buffer has no memory (internals/views.py).

The buffer's storage is resized, never replaced: autograd saves views of it for backward, such as
the transposed weight of a linear layer, and these must see the values that a later gather writes.
That is no change in autograd's eyes, because a parameter counts its own writes, not its buffer's.

On a GPU the memory is allocated, used and given back on the stream that computes. A gather starts
behind what is queued on that stream, and the stream waits for it before the memory is used or given
back. So no other stream has to be told about it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ddp.sharded.internals.agreement import noted
from ddp.sharded.internals.views import hide, make_stand_ins, show
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import all_gather


class GatheredUnit(FlatUnit):
    """Parameters that lie in one flat buffer, which has memory while a module computes with them.

    Attributes:
        shard: this rank's slice of the values, in the dtype that the parameters had.
        name: that of its block; "" if it belongs to none.
        names: of its parameters.
        computes: its block's forward is running, so that it is not freed.
        was_called: code of a forward has run since it was gathered, and may have written to it.
    """

    def __init__(
        self,
        names: dict[Parameter, str],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        name: str,
    ):
        super().__init__(list(names), group, itemsize=dtype.itemsize)
        self.name, self.names = name, list(names.values())
        self.computes = self.has_memory = self.was_called = False
        self._work: Any = None  # of a gather that nobody has waited for
        self.shard = self.shard.clone()
        self.values = torch.empty_like(self.values, dtype=dtype)
        self.value_views, self._own = self.views(self.values), self.own(self.values)
        self.values.untyped_storage().resize_(0)
        make_stand_ins(self)

    def start(self) -> None:
        """Allocates the memory of the values, and starts to gather them."""
        self.has_memory = True
        self.values.untyped_storage().resize_(self.values.nbytes)
        self._work = all_gather(self.values, self._own.copy_(self.shard), self.group)

    def wait(self) -> None:
        """Makes the parameters whole, for later work of the current stream."""
        if self._work is not None:
            try:
                noted(self._work.wait, "gather", self.name)
            except RuntimeError:  # a later gather begins anew
                self._work, self.has_memory = None, False
                raise
            self._work = None
            show(self)

    def free(self) -> None:
        """Makes the parameters stand-ins and frees their memory, unless a forward computes."""
        if self.has_memory and not self.computes:
            self.wait()
            hide(self)
            self.has_memory = False
            self.values.untyped_storage().resize_(0)
