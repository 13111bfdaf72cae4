"""Launches buckets of gradients: each once it is complete, in one order on every rank.

Collectives match by call order alone. If two ranks launched the same buckets in different orders,
gradients of different parameters would be summed without any error. So a complete bucket is held
back until its predecessors in the plan are launched; the plan is the same on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ALIGNMENT_BYTES = 16  # the optimizer's vectorised loads need aligned views


@dataclass(eq=False)
class Bucket:
    """A group of gradients of one dtype that are reduced together.

    Attributes:
        members: indices of the gradients, in the order in which they become ready.
        offsets: where each member starts in a flat buffer, in elements.
        numel: elements of that flat buffer, alignment included.
        nbytes: bytes of the members themselves.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    nbytes: int


def lay_out(numels: Iterable[int], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Returns aligned offsets of tensors that lie one behind the other, and where the last ends."""
    unit = max(1, ALIGNMENT_BYTES // itemsize)
    *offsets, end = accumulate((-(-numel // unit) * unit for numel in numels), initial=0)
    return tuple(offsets), end


class Schedule:
    """The buckets of a plan, and which of them are complete, launched and in flight.

    A round launches every bucket once. A step has a round for each backward that reduces.

    Attributes:
        arrivals: how often each gradient became ready in this step, first arrival first.
        ready: the gradients that became ready in this round.
        launched: number of buckets launched in this round, and index of the next one.
        in_flight: what `launch` returned, for each bucket that was not waited for.
    """

    def adopt(self, order: list[int], buckets: list[Bucket]) -> None:
        self.order, self.buckets = order, buckets
        self.bucket_of = {i: bucket for bucket in buckets for i in bucket.members}

    def begin_step(self) -> None:
        self.arrivals: dict[int, int] = {}
        self.begin_round()

    def begin_round(self) -> None:
        self.ready: set[int] = set()
        self.launched = 0
        self.in_flight: dict[Bucket, Any] = {}

    def arrive(self, i: int) -> None:
        self.arrivals[i] = self.arrivals.get(i, 0) + 1
        self.ready.add(i)
