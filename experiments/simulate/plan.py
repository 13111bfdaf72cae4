"""What a variant sends when, and what it copies.

The hand-built variants are planned by their own `ddp.buckets.plan_buckets`. PyTorch's DDP closes a
bucket once it is full, the first at 1 MiB. A bucket of `fsdp` is a block, or all in no block.
"""

from dataclasses import dataclass

from ddp.buckets import Gradient, plan_buckets
from lm.memory import MIB, SHARDED, bucket_mb
from lm.shape import Shape

SINGLE = ("ddp", "ddp_individual")  # each gradient travels alone, and is divided afterwards
IN_PLACE = ("none", "ddp_individual_v2")


@dataclass(frozen=True)
class Plan:
    """Buckets of gradients, by place in the order of arrival; their bytes; copies of each byte."""

    buckets: list[tuple[int, ...]]
    nbytes: list[int]
    copies: int


def plan(variant: str, shape: Shape) -> Plan:
    """Returns what a variant does with gradients of these sizes."""
    names, sizes = list(shape.gradients), list(shape.gradients.values())
    capacity = 0 if variant in SINGLE else int(bucket_mb(variant, shape.bucket_size_mb) * MIB)
    if variant == "none":
        buckets = []
    elif variant == "fsdp":
        units: dict[str, tuple[int, ...]] = {}
        for i, name in enumerate(names):
            unit = name.split(".")[1] if name.startswith("blocks.") else "root"
            units[unit] = (*units.get(unit, ()), i)
        buckets = sorted(units.values(), key=max)
    elif variant.startswith("torch_ddp"):
        buckets = _closed_when_full([size * shape.width for size in sizes], capacity)
    else:
        gradients = [Gradient(size, shape.dtype, shape.width) for size in sizes]
        order = list(range(len(sizes)))
        buckets = [bucket.members for bucket in plan_buckets(gradients, order, capacity)]
    return Plan(
        buckets,
        nbytes=[shape.width * sum(sizes[i] for i in bucket) for bucket in buckets],
        copies=2 if variant == "torch_ddp" else int(variant not in IN_PLACE),
    )


def kind_of(variant: str) -> str:
    return "reduce_scatter" if variant in SHARDED else "all_reduce"


def _closed_when_full(nbytes: list[int], capacity: int) -> list[tuple[int, ...]]:
    buckets: list[tuple[int, ...]] = [()]
    for i, _ in enumerate(nbytes):
        limit = capacity if len(buckets) > 1 else min(capacity, MIB)
        if sum(nbytes[j] for j in buckets[-1]) >= limit:
            buckets.append(())
        buckets[-1] += (i,)
    return buckets
