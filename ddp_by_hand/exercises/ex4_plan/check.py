"""The properties of exercise 4, each on the same fixed and random cases."""

import random
from dataclasses import asdict, dataclass

from ddp_by_hand.exercises.attempt import Rank, Wrong

WORLD_SIZES = (1,)


@dataclass(frozen=True)
class Case:
    nbytes: list[int]
    dtypes: list[str]
    order: list[int]
    capacity: int
    tail: int

    def show(self) -> str:
        dtypes = self.dtypes if len(set(self.dtypes)) > 1 else f"all {self.dtypes[0]}"
        return (
            f"nbytes {self.nbytes}, dtypes {dtypes}, order {self.order}, "
            f"capacity {self.capacity}, tail {self.tail}"
        )

    def bytes_of(self, bucket: list[int]) -> int:
        return sum(self.nbytes[i] for i in bucket)

    def place(self, i: int) -> int:
        return self.order.index(i)


def cases() -> list[Case]:
    ten = Case([40] * 10, ["float32"] * 10, list(range(9, -1, -1)), 120, 50)
    two_types = Case([40, 20] * 4, ["float32", "bfloat16"] * 4, list(range(7, -1, -1)), 100, 40)
    large = Case([10, 500, 10, 30], ["float32"] * 4, [3, 2, 1, 0], 100, 50)
    last_large = Case([500, 10, 10], ["float32"] * 3, [2, 1, 0], 100, 50)
    shuffled = Case([40] * 6, ["float32"] * 6, [2, 5, 0, 1, 4, 3], 90, 40)
    alone = Case([40], ["float32"], [0], 90, 40)
    return [ten, two_types, large, last_large, shuffled, alone, *map(random_case, range(60))]


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    count = draw.randrange(1, 25)
    order = list(range(count))
    draw.shuffle(order)
    return Case(
        nbytes=[draw.choice([4, 8, 40, 100, 300]) for _ in range(count)],
        dtypes=[draw.choice(["float32", "float32", "bfloat16"]) for _ in range(count)],
        order=order,
        capacity=draw.choice([100, 200, 1000]),
        tail=draw.choice([20, 100]),
    )


def plans(rank: Rank) -> list[tuple[Case, list[list[int]]]]:
    found = []
    for case in cases():
        arguments = {k: list(v) if isinstance(v, list) else v for k, v in asdict(case).items()}
        buckets = rank.solution.plan_buckets(**arguments)
        if not (isinstance(buckets, list) and all(isinstance(b, list) for b in buckets)):
            raise Wrong(f"the plan is {buckets!r} and should be a list of lists of indices")
        found.append((case, buckets))
    return found


def wrong(case: Case, buckets: list[list[int]], why: str) -> Wrong:
    return Wrong(f"{why}; the plan is {buckets} for {case.show()}")


def partition(rank: Rank) -> None:
    """Every gradient is in exactly one bucket."""
    for case, buckets in plans(rank):
        members = sorted(i for bucket in buckets for i in bucket)
        if members != sorted(case.order) or [] in buckets:
            raise wrong(case, buckets, "a gradient is missing or twice there, or a bucket is empty")


def one_dtype(rank: Rank) -> None:
    """A bucket holds one dtype."""
    for case, buckets in plans(rank):
        for bucket in buckets:
            if len({case.dtypes[i] for i in bucket}) > 1:
                raise wrong(case, buckets, f"bucket {bucket} holds two dtypes")


def arrival(rank: Rank) -> None:
    """Gradients stand in their order of arrival, inside a bucket."""
    for case, buckets in plans(rank):
        for bucket in buckets:
            if bucket != sorted(bucket, key=case.place):
                raise wrong(case, buckets, f"bucket {bucket} is not in the order of arrival")


def completion(rank: Rank) -> None:
    """The buckets stand in the order in which they become complete."""
    for case, buckets in plans(rank):
        complete = [max(map(case.place, bucket)) for bucket in buckets]
        if complete != sorted(complete):
            raise wrong(case, buckets, "a bucket stands before one that is complete earlier")


def capacity(rank: Rank) -> None:
    """A bucket of several gradients holds at most `capacity` bytes."""
    for case, buckets in plans(rank):
        for bucket in buckets:
            if len(bucket) > 1 and case.bytes_of(bucket) > case.capacity:
                raise wrong(case, buckets, f"bucket {bucket} has {case.bytes_of(bucket)} bytes")


def filled(rank: Rank) -> None:
    """Buckets are filled: there are few of them."""
    for case, buckets in plans(rank):
        for dtype in set(case.dtypes):
            mine = [b for b in buckets if case.dtypes[b[0]] == dtype]
            allowed = 2 * sum(map(case.bytes_of, mine)) // case.capacity + 3
            if len(mine) > allowed:
                raise wrong(case, buckets, f"{len(mine)} buckets of {dtype}, {allowed} would do")


def small_tail(rank: Rank) -> None:
    """The bucket that is complete last holds at most `tail` bytes, or one gradient."""
    for case, buckets in plans(rank):
        last = max(buckets, key=lambda bucket: max(map(case.place, bucket)))
        if len(last) > 1 and case.bytes_of(last) > case.tail:
            raise wrong(case, buckets, f"the last bucket {last} has {case.bytes_of(last)} bytes")


PROPERTIES = [partition, one_dtype, arrival, completion, capacity, filled, small_tail]
