"""Every gradient travels alone."""


def plan_buckets(nbytes, dtypes, order, capacity, tail):
    return [[i] for i in order]
