"""The last bucket is as large as the others."""

from tests.exercises.solutions import plan


def plan_buckets(nbytes, dtypes, order, capacity, tail):
    return plan.plan_buckets(nbytes, dtypes, order, capacity, tail=capacity)
