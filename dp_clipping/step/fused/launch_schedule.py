"""Decides when queued work of layers is launched: at sync points, or when memory is short.

A launch serves many layers, so their operands are queued. Two events launch the queue.

*Sync points.* Collectives of norms and sums are issued between those of the layers. Every rank of a
sharded model must issue all of them in the same order, whatever its batch, its memory and its plan.
So they are issued once enough complete FSDP units are ready (a unit is what one FSDP module
gathers).

*Memory pressure.* Work that needs no other rank is launched when the memory that backward has freed
is used up. Each rank decides this for itself.
"""

from collections import Counter

import torch
from torch import Tensor

from dp_clipping.distributed.sharding import Sharding
from dp_clipping.kernels.launch.tiles import stream_on
from dp_clipping.layers.recorder import Trainable

PENDING_BYTES = 1 << 28  # of what waits for a common launch, in any case
MOST_PENDING_BYTES = 1 << 31  # the same, in memory that backward has freed
UNIT_BYTES = 1 << 30  # of sums that leave together where FSDP's modules are smaller,
MEETINGS = 8  # and where all of them are few: this part of them


class LaunchSchedule:
    """Schedules the launches of one step on one rank.

    Args:
        sharding: how the network is spread over ranks; None: it is not, and there are no sync
            points.
        device: whose memory counts; without a GPU there is no memory pressure.
    """

    def __init__(self, sharding: Sharding | None, device: torch.device):
        self._sharding, self._device = sharding, device
        self._at_first = self._held = allocated(device)
        self._stream: int | None = None  # of the backward under way
        self.begin()

    def begin(self) -> None:
        """Begins a backward, or the sums after it, with an empty queue."""
        self._pending = 0  # bytes that nothing else would hold
        self._may_wait = PENDING_BYTES  # of these, before the next look at the memory
        self._arrivals: Counter[int] = Counter()  # of parameters, by the unit that they are of
        self._complete = 0  # bytes of the units that have all, since the last sync point

    def begin_backward(self) -> None:
        """Begins a backward, which frees memory from here on."""
        self._held = allocated(self._device)
        self._stream = None
        self.begin()

    def check_stream(self, x: Tensor) -> None:
        """Raises RuntimeError if layers ran on several streams: a launch reads from one."""
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
        """Returns the bytes that the forward has saved for its backward."""
        return allocated(self._device) - self._at_first

    def add(self, size: int) -> bool:
        """Adds to the bytes in the queue. Returns whether it may be launched."""
        self._pending += size
        return self._sharding is not None or self._pending > self._may_wait

    def launched(self) -> None:
        """Records that the queue is empty."""
        self._pending, self._may_wait = 0, PENDING_BYTES

    def is_sync_point(self, parameter: Trainable) -> bool:
        """Returns whether this parameter's arrival is a sync point. Called once per parameter."""
        if self._sharding is None:
            return False
        unit = self._sharding.parts[parameter.parameter].unit
        self._arrivals[unit] += 1
        if self._arrivals[unit] == len(self._sharding.units[unit]):
            self._complete += self._sharding.unit_bytes[unit]
        enough = min(UNIT_BYTES, self._sharding.bytes // MEETINGS)
        return self._complete > 0 and self._complete >= enough

    def reset_sync_point(self) -> None:
        """Records that the complete units have been sent."""
        self._complete = 0

    def is_crowded(self) -> bool:
        """Returns whether the queue has to be launched now, for lack of memory."""
        return self._pending > self._may_wait and not self._has_room()

    def _has_room(self) -> bool:
        """Returns whether memory is left, and allows the queue half of it.

        The launch itself, above all its sums, needs the other half.
        """
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
