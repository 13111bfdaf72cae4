"""Plans which gradients are reduced together, from numbers alone: no tensors, no communication.

Every rank computes the same plan from the same model, so that collectives, which match by call
order, always meet their counterparts.

- A bucket holds one dtype, because a flat buffer and a collective do.
- Buckets follow the order in which gradients become ready, so that the first is complete early.
- The last buckets are small. Communication after the last gradient is ready cannot overlap
  the backward pass, so no bucket takes more than half of the bytes that are still to come.
  A gradient that is larger than a bucket travels alone and does not count: a token embedding,
  often the last to be ready, would otherwise let the bucket before it be as large as itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp.schedule import Bucket, lay_out

SMALLEST_TAIL_BYTES = 1 << 20  # below this a collective is all latency


@dataclass(frozen=True)
class Gradient:
    """One gradient as a plan sees it: its number of elements and their dtype."""

    numel: int
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def plan_buckets(
    gradients: Sequence[Gradient], order: Sequence[int], bucket_bytes: float | None
) -> list[Bucket]:
    """Cuts `order`, a permutation of the indices, into buckets of at most `bucket_bytes`.

    A larger gradient has a bucket of its own, with 0 each has; None puts all of a dtype into one.
    The buckets are in the order in which they become complete: so every rank launches them.
    """
    position = {i: place for place, i in enumerate(order)}
    by_dtype: dict[str, list[int]] = {}
    for i in order:
        by_dtype.setdefault(gradients[i].dtype, []).append(i)
    groups = [g for of_one in by_dtype.values() for g in _cut(of_one, gradients, bucket_bytes)]
    groups.sort(key=lambda group: position[group[-1]])
    buckets = []
    for group in groups:
        members = [gradients[i] for i in group]
        offsets, numel = lay_out([g.numel for g in members], members[0].itemsize)
        buckets.append(Bucket(tuple(group), offsets, numel, sum(g.nbytes for g in members)))
    return buckets


def _cut(
    indices: list[int], gradients: Sequence[Gradient], bucket_bytes: float | None
) -> list[list[int]]:
    if bucket_bytes is None:
        return [indices]
    remaining = sum(gradients[i].nbytes for i in indices if gradients[i].nbytes <= bucket_bytes)
    groups: list[list[int]] = []
    filled, capacity = 0, -1.0
    for i in indices:
        nbytes = gradients[i].nbytes
        if filled + nbytes > capacity:
            groups.append([])
            filled, capacity = 0, min(bucket_bytes, max(remaining / 2, SMALLEST_TAIL_BYTES))
        groups[-1].append(i)
        filled += nbytes
        if nbytes <= bucket_bytes:
            remaining -= nbytes
    return groups
