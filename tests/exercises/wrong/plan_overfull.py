"""A bucket is closed after the gradient that overfills it."""


def plan_buckets(nbytes, dtypes, order, capacity, tail):
    buckets, open_buckets = [], {}
    for i in order:
        bucket = open_buckets.get(dtypes[i])
        if bucket is None or sum(nbytes[k] for k in bucket) >= capacity:
            open_buckets[dtypes[i]] = bucket = []
            buckets.append(bucket)
        bucket.append(i)
    return sorted(buckets, key=lambda bucket: order.index(bucket[-1]))
