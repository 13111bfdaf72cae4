"""A process group that does what a real one does and writes down what it was asked.

It records every collective (name, sizes, dtypes, operation, whether asynchronous) and every wait,
in order, in one list, so that a test can count them and see what happened before what. Further
marks, such as "the hook of this parameter has run", go into the same list.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class Event:
    """What happened: a collective's name, `"wait"`, or a mark of the test."""

    what: str
    numels: tuple[int, ...] = ()
    dtype: str = ""
    op: str = ""
    asynchronous: bool = False
    detail: Any = None

    @property
    def numel(self) -> int:
        return sum(self.numels)


class RecordedWork(dist.Work):
    def __init__(self, inner: dist.Work, events: list[Event]):
        super().__init__()
        self._inner, self._events = inner, events

    def wait(self, *arguments: Any) -> bool:
        self._events.append(Event("wait"))
        return self._inner.wait(*arguments)

    def get_future(self) -> torch.futures.Future:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class RecordingGroup(dist.ProcessGroup):
    """Forwards to `inner`; see the module's docstring.

    Attributes:
        events: everything so far, first to last.
    """

    def __init__(self, inner: dist.ProcessGroup):
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self.events: list[Event] = []

    def mark(self, what: str, detail: Any = None) -> None:
        self.events.append(Event(what, detail=detail))

    def gradient_collectives(self) -> list[Event]:
        return [e for e in self.events if e.what.startswith(("allreduce", "reduce_scatter"))]

    def _record(self, what: str, tensors: list[Tensor], options: Any, work: dist.Work) -> dist.Work:
        op = getattr(options, "reduceOp", None)
        self.events.append(
            Event(
                what,
                numels=tuple(t.numel() for t in tensors),
                dtype=" ".join(sorted({str(t.dtype) for t in tensors})),
                op="" if op is None else _op_name(op),
                asynchronous=bool(getattr(options, "asyncOp", False)),
            )
        )
        return RecordedWork(work, self.events)

    def allreduce(self, tensors, options=None):
        options = options or dist.AllreduceOptions()
        return self._record("allreduce", tensors, options, self._inner.allreduce(tensors, options))

    def allreduce_coalesced(self, tensors, options=None):
        options = options or dist.AllreduceCoalescedOptions()
        work = self._inner.allreduce_coalesced(tensors, options)
        return self._record("allreduce_coalesced", tensors, options, work)

    def broadcast(self, tensors, options):
        return self._record("broadcast", tensors, options, self._inner.broadcast(tensors, options))

    def allgather(self, outputs, tensors, options=None):
        options = options or dist.AllgatherOptions()
        work = self._inner.allgather(outputs, tensors, options)
        return self._record("allgather", tensors, options, work)

    def reduce_scatter_single(self, output, tensor, options):
        work = self._inner.reduce_scatter_single(output, tensor, options)
        return self._record("reduce_scatter", [tensor], options, work)

    def all_gather_single(self, output, tensor, options):
        work = self._inner.all_gather_single(output, tensor, options)
        return self._record("all_gather", [tensor], options, work)

    def _reduce_scatter_base(self, output, tensor, options):  # before torch 2.13
        work = self._inner._reduce_scatter_base(output, tensor, options)
        return self._record("reduce_scatter", [tensor], options, work)

    def _allgather_base(self, output, tensor, options):  # before torch 2.13
        work = self._inner._allgather_base(output, tensor, options)
        return self._record("all_gather", [tensor], options, work)

    def barrier(self, opts=None):
        opts = opts or dist.BarrierOptions()
        return self._record("barrier", [], opts, self._inner.barrier(opts))

    def getBackendName(self) -> str:
        return "recording"


def _op_name(op: Any) -> str:
    named = [n for n in ("SUM", "AVG", "MAX", "MIN") if op == getattr(dist.ReduceOp, n)]
    return named[0] if named else str(op)


@contextmanager
def recording(group: dist.ProcessGroup) -> Iterator[RecordingGroup]:
    """`group` recorded; torch's tables know the recorder while the block lasts."""
    recorder = RecordingGroup(group)
    world = distributed_c10d._world
    tables = [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config]
    for table in tables:
        if group in table:
            table[recorder] = table[group]
    try:
        yield recorder
    finally:
        for table in tables:
            table.pop(recorder, None)
