"""Plans which gradients are reduced together, from numbers alone: no tensors, no communication.

Every rank computes the same plan from the same model, so it can be tested alone and it is the
reason why collectives, which match by call order, always meet their counterparts.

Three rules, each of which public hand-built versions often miss:

- a bucket holds one dtype, because a flat buffer and a collective do;
- buckets follow the order in which gradients become ready, so that the first is complete early;
- the last buckets are small. Communication after the last gradient is ready cannot overlap
  the backward pass, so no bucket takes more than half of the bytes that are still to come.
  A gradient that is larger than a bucket travels alone and does not count: a token embedding,
  often the last to be ready, would otherwise let the bucket before it be as large as itself.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

ALIGNMENT_BYTES = 16  # the optimizer's vectorised loads need aligned views
SMALLEST_TAIL_BYTES = 1 << 20  # below this a collective is all latency


@dataclass(frozen=True)
class Gradient:
    """One gradient as the plan sees it: its number of elements and their dtype."""

    numel: int
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
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


def mebibytes(bucket_size_mb: float | None) -> int | None:
    """Returns the bytes of the option `bucket_size_mb`, which is in MiB as in PyTorch's DDP.

    None, which means one bucket, stays None.

    Raises:
        ValueError: if it is not a positive finite number.
    """
    if bucket_size_mb is None:
        return None
    if not 0 < bucket_size_mb < inf:
        raise ValueError(
            f"bucket_size_mb: {bucket_size_mb} is not a positive number of MiB, nor None for one "
            "bucket"
        )
    return int(bucket_size_mb * (1 << 20))


def one_bucket_each(gradients: Sequence[Gradient], order: Sequence[int]) -> list[Bucket]:
    """Returns the plan without batching: every gradient travels alone."""
    return plan_buckets(gradients, order, bucket_bytes=0)


def plan_buckets(
    gradients: Sequence[Gradient],
    order: Sequence[int],
    bucket_bytes: float | None = inf,
    alone: Collection[int] = (),
) -> list[Bucket]:
    """Cuts `order` into buckets of at most `bucket_bytes`, small ones last.

    A gradient larger than a bucket has one of its own. The buckets are returned in the order in
    which they become complete when gradients become ready in `order`: that is the order in which
    every rank launches them.

    Args:
        gradients: all gradients, by index.
        order: a permutation of their indices, first ready first.
        bucket_bytes: the capacity; 0 puts every gradient in a bucket of its own, None all of a
            dtype in one.
        alone: gradients that have a bucket of their own, whatever their size.

    Raises:
        ValueError: if `order` is not a permutation of the indices.
    """
    if sorted(order) != list(range(len(gradients))):
        raise ValueError(f"the order is no permutation of {len(gradients)} gradients: {order}")
    position = {index: place for place, index in enumerate(order)}
    batched = [i for i in order if i not in alone]
    groups = [
        group
        for dtype in dict.fromkeys(gradients[i].dtype for i in order)
        for group in _cut(
            [i for i in batched if gradients[i].dtype == dtype], gradients, bucket_bytes
        )
    ]
    groups += [(i,) for i in order if i in alone]
    groups.sort(key=lambda group: position[group[-1]])
    return [_lay_out(group, gradients) for group in groups]


def _cut(
    indices: list[int], gradients: Sequence[Gradient], bucket_bytes: float | None
) -> list[tuple[int, ...]]:
    if bucket_bytes is None:
        return [tuple(indices)] if indices else []
    remaining = sum(gradients[i].nbytes for i in indices if gradients[i].nbytes <= bucket_bytes)
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    filled, capacity = 0, 0.0
    for i in indices:
        nbytes = gradients[i].nbytes
        if group and filled + nbytes > capacity:
            groups.append(tuple(group))
            group, filled = [], 0
        if not group:
            capacity = min(bucket_bytes, max(remaining / 2, SMALLEST_TAIL_BYTES))
        group.append(i)
        filled += nbytes
        if nbytes <= bucket_bytes:
            remaining -= nbytes
    return [*groups, tuple(group)] if group else groups


def _lay_out(group: tuple[int, ...], gradients: Sequence[Gradient]) -> Bucket:
    unit = max(1, ALIGNMENT_BYTES // gradients[group[0]].itemsize)
    padded = [-(-gradients[i].numel // unit) * unit for i in group]
    ends = list(accumulate(padded))
    return Bucket(
        members=group,
        offsets=tuple(end - size for end, size in zip(ends, padded, strict=True)),
        numel=ends[-1],
        nbytes=sum(gradients[i].nbytes for i in group),
    )
