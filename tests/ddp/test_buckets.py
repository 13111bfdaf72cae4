"""The plan alone: numbers in, numbers out."""

import math
import random
from dataclasses import asdict

import pytest

from ddp.buckets import SMALLEST_TAIL_BYTES, Gradient, plan_buckets
from ddp.internals.interface import mebibytes
from ddp.schedule import ALIGNMENT_BYTES, Bucket

SIZES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float64": 8}
MIB = 1 << 20


def floats(*numels: int) -> list[Gradient]:
    return [Gradient(n, "torch.float32", 4) for n in numels]


def random_case(seed: int) -> tuple[list[Gradient], list[int], float]:
    choose = random.Random(seed)
    gradients = []
    for _ in range(choose.randint(1, 60)):
        dtype = choose.choice(list(SIZES)[: 1 + seed % 3])
        largest = choose.choice([3, 1000, 3_000_000])
        gradients.append(Gradient(choose.randint(0, largest), dtype, SIZES[dtype]))
    order = list(range(len(gradients)))
    choose.shuffle(order)
    return gradients, order, choose.choice([0, 1, 999, MIB, 25 * MIB, float("inf")])


@pytest.mark.parametrize("seed", range(60))
def test_properties_of_a_plan(seed):
    gradients, order, capacity = random_case(seed)
    buckets = plan_buckets(gradients, order, capacity)
    place = {index: at for at, index in enumerate(order)}

    everyone = [i for bucket in buckets for i in bucket.members]
    assert sorted(everyone) == sorted(order), "every gradient travels once"
    for bucket in buckets:
        assert len({gradients[i].dtype for i in bucket.members}) == 1
        places = [place[i] for i in bucket.members]
        assert places == sorted(places), "members follow the order of readiness"
        assert bucket.nbytes == sum(gradients[i].nbytes for i in bucket.members)
        assert len(bucket.members) == 1 or bucket.nbytes <= capacity
        check_layout(bucket, gradients)

    completed = [max(place[i] for i in bucket.members) for bucket in buckets]
    assert completed == sorted(completed), "launched in the order in which they are complete"
    again = plan_buckets(gradients, order, capacity)
    assert [asdict(b) for b in again] == [asdict(b) for b in buckets], "the same on every rank"
    check_halves(buckets, gradients, capacity)


def check_layout(bucket: Bucket, gradients: list[Gradient]) -> None:
    """Slices are aligned, disjoint, in order, and waste less than one unit each."""
    end = 0
    for i, start in zip(bucket.members, bucket.offsets, strict=True):
        assert start * gradients[i].itemsize % ALIGNMENT_BYTES == 0
        assert 0 <= start - end < ALIGNMENT_BYTES
        end = start + gradients[i].numel
    assert end <= bucket.numel < end + ALIGNMENT_BYTES


def check_halves(buckets: list[Bucket], gradients: list[Gradient], capacity: float) -> None:
    """Asserts that no bucket takes more than half of the rest of its dtype that can share one.

    Single gradients and buckets below the smallest tail cannot help it.
    """
    for dtype in SIZES:
        of_dtype = [b for b in buckets if gradients[b.members[0]].dtype == dtype]
        of_dtype = [b for b in of_dtype if b.nbytes <= capacity]
        rest = sum(b.nbytes for b in of_dtype)
        for bucket in of_dtype:
            allowed = max(rest / 2, SMALLEST_TAIL_BYTES)
            assert len(bucket.members) == 1 or bucket.nbytes <= allowed
            rest -= bucket.nbytes


def test_no_capacity_is_one_bucket_per_dtype():
    assert [mebibytes(size) for size in (None, 1, 0.5, 100)] == [None, MIB, MIB // 2, 100 * MIB]
    for seed in range(20):
        gradients, order, _ = random_case(seed)
        buckets = plan_buckets(gradients, order, None)
        assert len(buckets) == len({g.dtype for g in gradients})
        assert sorted(i for b in buckets for i in b.members) == sorted(order)
        for bucket in buckets:
            check_layout(bucket, gradients)


@pytest.mark.parametrize(("last", "alone"), [([], []), ([64 * MIB], [256])])
def test_the_last_buckets_are_small(last, alone):
    """Compares sizes, also before a large last gradient, as a token embedding is."""
    gradients = floats(*[MIB // 8] * 256, *last)  # 128 MiB in halves of a MiB
    sizes = [b.nbytes / MIB for b in plan_buckets(gradients, range(len(gradients)), 50 * MIB)]
    assert sizes == [50, 39, 19.5, 9.5, 5, 2.5, 1, 1, 0.5, *alone]


MIXED = [Gradient(4, "torch.float32", 4), Gradient(4, "torch.bfloat16", 2)] * 2


@pytest.mark.parametrize(
    ("gradients", "order", "capacity", "members"),
    [
        pytest.param(floats(10, 10_000, 10, 10), [0, 1, 2, 3], 100, [(0,), (1,), (2, 3)],
                     id="one that is larger than a bucket is alone"),
        pytest.param(floats(*[10] * 9), range(9), 120, [(0, 1, 2), (3, 4, 5), (6, 7, 8)],
                     id="neighbours that fit together travel together"),
        pytest.param(floats(*[10] * 9), range(9), math.inf, [tuple(range(9))], id="all fit"),
        pytest.param(floats(5, 0, 7), [2, 0, 1], 0, [(2,), (0,), (1,)], id="one each, in order"),
        pytest.param(MIXED, [3, 2, 1, 0], math.inf, [(3, 1), (2, 0)], id="a dtype each"),
        pytest.param(MIXED, [0, 1, 3, 2], math.inf, [(1, 3), (0, 2)], id="the complete one first"),
    ],
)  # fmt: skip
def test_members_of_buckets(gradients, order, capacity, members):
    assert [b.members for b in plan_buckets(gradients, order, capacity)] == members
