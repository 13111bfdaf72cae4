"""When what layers have handed over is launched: where ranks meet, or where memory asks for it.

A launch serves many layers, so what they hand over waits. Two things end the waiting.

*Meetings.* Collectives of norms and sums are among the layers' own, and every rank of a sharded
model must issue all of them in one order, whatever the sizes of its batch, its memory and its plan.
So they leave when all of some units (what one FSDP module gathers is one) has arrived, as many
units as are worth it.

*Crowding.* What is only computed, and waits here or for the next meeting, each rank decides for
itself, by what backward has freed and nobody took since.
"""

from collections import Counter

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.distributed.sharding import Sharding
from dp_clipping.kernels.launch.tiles import stream_on

PENDING_BYTES = 1 << 28  # of what waits for a common launch, in any case
MOST_PENDING_BYTES = 1 << 31  # the same, in memory that backward has freed
UNIT_BYTES = 1 << 30  # of sums that leave together where FSDP's modules are smaller,
MEETINGS = 8  # and where all of them are few: this part of them


class LaunchSchedule:
    """Schedules the launches of one step on one rank.

    Args:
        sharding: how the network is spread over ranks; None: it is not, and nobody is to be met.
        device: where memory is looked at; without a GPU there is none to be had.
    """

    def __init__(self, sharding: Sharding | None, device: torch.device):
        self._sharding, self._device = sharding, device
        self._at_first = self._held = allocated(device)
        self._stream: int | None = None  # of the backward under way
        self.begin()

    def begin(self) -> None:
        """Begins a backward, or the sums after it: nothing waits and nothing has arrived."""
        self._pending = 0  # bytes that nothing else would hold
        self._may_wait = PENDING_BYTES  # of these, before the next look at the memory
        self._arrivals: Counter[int] = Counter()  # of parameters, by the unit that they are of
        self._complete = 0  # bytes of the units that have all, since the last meeting

    def begin_backward(self) -> None:
        """Begins a backward, which frees memory from here on."""
        self._held = allocated(self._device)
        self._stream = None
        self.begin()

    def check_stream(self, x: Tensor) -> None:
        """Raises RuntimeError if layers ran on several streams: what a launch reads is on one."""
        if not x.is_cuda:
            return
        stream = stream_on(x.device)
        if self._stream is None:
            self._stream = stream
        elif self._stream != stream:
            raise RuntimeError(
                "layers of one backward ran on several CUDA streams, which the flash modes "
                "cannot take: run the forward on one stream, or use bookkeeping or ghost"
            )

    @property
    def saved(self) -> int:
        """Returns the bytes that the forward has left, for its backward."""
        return allocated(self._device) - self._at_first

    def add(self, size: int) -> bool:
        """Adds to the bytes that wait. Returns whether anything may be launched for it."""
        self._pending += size
        return self._sharding is not None or self._pending > self._may_wait

    def launched(self) -> None:
        """Notes that nothing waits any more."""
        self._pending, self._may_wait = 0, PENDING_BYTES

    def is_sync_point(self, parameter: Parameter) -> bool:
        """Returns whether ranks meet with this parameter's arrival. Called once for each."""
        if self._sharding is None:
            return False
        unit = self._sharding.parts[parameter].unit
        self._arrivals[unit] += 1
        if self._arrivals[unit] == len(self._sharding.units[unit]):
            self._complete += self._sharding.unit_bytes[unit]
        enough = min(UNIT_BYTES, self._sharding.bytes // MEETINGS)
        return self._complete > 0 and self._complete >= enough

    def reset_sync_point(self) -> None:
        """Notes that what was complete has left."""
        self._complete = 0

    def is_crowded(self) -> bool:
        """Returns whether what waits has to be launched now."""
        return self._pending > self._may_wait and not self._has_room()

    def _has_room(self) -> bool:
        """Each look grants half of what is free, until little is left: the other half is for what
        the launch itself takes, sums above all."""
        free = self._held - allocated(self._device) - self._pending
        room = min(MOST_PENDING_BYTES, self._pending + free // 2)
        if room < self._pending + PENDING_BYTES // 4:
            return False
        self._may_wait = room
        return True


def allocated(device: torch.device) -> int:
    """Returns bytes in use. `torch.cuda.memory_allocated` takes longer: it sorts statistics."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
