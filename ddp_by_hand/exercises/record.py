"""Records the calls of torch.distributed, in order, while a solution runs.

Every public call is recorded once, with the size of its largest tensor, its peer and whether it was
asynchronous; a call that torch makes on behalf of another is not. `wait()` on what an asynchronous
call returned is recorded too, and a check adds marks of its own, such as "this gradient has been
accumulated". So one list gives the order of events. A reduce-scatter and an all-gather into one
tensor deliver at `wait()` (transfer.py), which records whether their tensors were left alone.

The calls also go into a file, one line each, written before the call is made: if the rank never
returns, the file still says where it stopped.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_by_hand.exercises.transfer import GATHERS, SCATTERS, Transfer

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", *GATHERS,
    "gather", "scatter", "reduce_scatter", *SCATTERS, "all_to_all", "all_to_all_single",
    "barrier", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One event: `what` is the name of a call, or a mark with its `detail`.

    Marks are `"wait"` with the name of the call as its detail, `"freed"` and `"overwritten"` with
    the call's size, `"changed"` if an all-reduce's tensor was written before its wait, and those of
    a check.
    """

    what: str
    numel: int = 0
    nbytes: int = 0
    data_ptr: int = 0
    peer: int | None = None
    asynchronous: bool = False
    detail: Any = None
    storage: StorageWeakRef | None = None


class Record:
    """Attributes: `events`, first to last."""

    def __init__(self, file: Path):
        self.events: list[Event] = []
        self._file = file
        self._depth = 0

    def mark(self, what: str, detail: Any = None) -> None:
        self.events.append(Event(what, detail=detail))

    def clear(self) -> None:
        self.events.clear()

    def calls(self, *names: str) -> list[Event]:
        """Returns the calls of these names; of all names if none is given."""
        return [e for e in self.events if e.what in (names or COLLECTIVES + POINT_TO_POINT)]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replaces torch.distributed's functions by recorded ones inside the block."""
        originals = {
            (module, name): getattr(module, name)
            for module in (dist, distributed_c10d)
            for name in COLLECTIVES + POINT_TO_POINT
            if hasattr(module, name)
        }
        recorded = {name: self._recorded(name, f) for (_, name), f in originals.items()}
        for module, name in originals:
            setattr(module, name, recorded[name])
        try:
            yield
        finally:
            for (module, name), function in originals.items():
                setattr(module, name, function)

    def _recorded(self, name: str, function: Callable) -> Callable:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args, **kwargs):
            bound, transfer = signature.bind(*args, **kwargs), None
            if self._depth == 0:
                self._write_down(name, bound.arguments)
                if name in SCATTERS + GATHERS:
                    transfer = self._copied(name, bound.arguments)
            self._depth += 1
            try:
                answer = function(*bound.args, **bound.kwargs)
            finally:
                self._depth -= 1
            if isinstance(answer, dist.Work):
                reduced = bound.arguments.get("tensor") if name == "all_reduce" else None
                return RecordedWork(answer, self, name, transfer, reduced)
            if transfer is not None:
                transfer.deliver()
            return answer

        return call

    @staticmethod
    def _copied(name: str, arguments: dict[str, Any]) -> Transfer:
        """Puts copies in the place of output and source, the first two arguments."""
        to, source = list(arguments)[:2]
        transfer = Transfer(name, arguments[to], arguments[source])
        arguments[to], arguments[source] = transfer.received, transfer.sent
        return transfer

    def _write_down(self, name: str, arguments: dict[str, Any]) -> None:
        tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
        tensor = max(tensors, key=Tensor.numel, default=None)
        event = Event(
            name,
            numel=0 if tensor is None else tensor.numel(),
            nbytes=0 if tensor is None else tensor.nbytes,
            data_ptr=0 if tensor is None else tensor.data_ptr(),
            peer=peer_of(arguments) if name in POINT_TO_POINT else None,
            asynchronous=name in ("isend", "irecv") or bool(arguments.get("async_op")),
            storage=None if tensor is None else StorageWeakRef(tensor.untyped_storage()),
        )
        self.events.append(event)
        with self._file.open("a") as file:
            line = {"what": event.what, "numel": event.numel, "peer": event.peer}
            file.write(json.dumps(line) + "\n")


def peer_of(arguments: dict[str, Any]) -> int | None:
    names = ("dst", "group_dst", "src", "group_src")
    return next((arguments[n] for n in names if arguments.get(n) is not None), None)


class RecordedWork:
    """Wraps what an asynchronous call returned; waiting for it is recorded as an event."""

    def __init__(
        self,
        work: dist.Work,
        record: Record,
        name: str = "",
        transfer: Transfer | None = None,
        reduced: Tensor | None = None,
    ):
        self._work, self._record, self._name, self._transfer = work, record, name, transfer
        self._reduced = reduced
        self._version = None if reduced is None else reduced._version

    def wait(self, *arguments: Any) -> bool:
        answer = self._work.wait(*arguments)
        self._ended()
        return answer

    def get_future(self) -> Any:
        if self._transfer is not None:
            self._work.wait()
        self._ended()  # a future is another way of waiting
        return self._work.get_future()

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed and self._transfer is not None:
            self._ended()
        return completed

    def _ended(self) -> None:
        """Records a wait. A transfer ends once, however often it is waited for."""
        reduced, self._reduced = self._reduced, None
        if reduced is not None and reduced._version != self._version:
            self._record.mark("changed")
        transfer, self._transfer = self._transfer, None
        if transfer is not None or self._name not in SCATTERS + GATHERS:
            self._record.mark("wait", self._name)
        if transfer is not None and (fault := transfer.deliver()):
            self._record.mark(fault, max(transfer.sent.numel(), transfer.received.numel()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
