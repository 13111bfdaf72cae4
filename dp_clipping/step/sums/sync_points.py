"""Sync points: where ranks of a sharded model send norms and sums in a backward.

Collectives of norms and sums are issued between those of the layers. Every rank must issue all of
them in the same order, whatever its batch, its memory and its plan. So they are issued once enough
complete FSDP units are ready (a unit is what one FSDP module gathers).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dp_clipping.layers.recorder import Trainable

UNIT_BYTES = 1 << 30  # of sums that leave together where FSDP's modules are smaller,
MEETINGS = 8  # and where all of them are few: this part of them


class SyncPoints:
    """Counts the parameters that have arrived in a backward, and sends their sums.

    Args:
        sharding: how the network is spread over ranks, a `Sharding`.
        departures: what sums are given to when they are formed: `Departures` or `ShardedSums`.
    """

    def __init__(self, sharding: Any, departures: Any):
        self._sharding, self._departures = sharding, departures
        self.begin()

    def begin(self) -> None:
        """Begins with no parameter that has arrived."""
        self._arrivals: dict[int, int] = defaultdict(int)  # of parameters, by their unit
        self._complete = 0  # bytes of the units that have all, since the last sync point

    @property
    def defers_sums(self) -> bool:
        """Returns whether sums that are formed now wait for the next sync point."""
        return self._departures.deferred

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Surrounds a backward, which sends sums only at sync points and at its end."""
        self._departures.deferred = True
        try:
            yield
        finally:
            self._departures.deferred = False
        self.send()

    def is_at(self, records: Iterable[Trainable]) -> bool:
        """Returns whether the arrival of these is a sync point. Called once for each."""
        for record in records:
            unit = self._sharding.parts[record.parameter].unit
            self._arrivals[unit] += 1
            if self._arrivals[unit] == len(self._sharding.units[unit]):
                self._complete += self._sharding.unit_bytes[unit]
        enough = min(UNIT_BYTES, self._sharding.bytes // MEETINGS)
        return self._complete > 0 and self._complete >= enough

    def send(self) -> None:
        """Sends the sums that have been formed, at a sync point or the end of a backward."""
        self.skip()
        self._departures.launch_ready()

    def skip(self) -> None:
        """Lets what has arrived be no reason for a sync point."""
        self._complete = 0
