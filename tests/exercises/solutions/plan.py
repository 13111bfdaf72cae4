def plan_buckets(nbytes, dtypes, order, capacity, tail):
    last = [order[-1]]
    for i in reversed(order[:-1]):
        if dtypes[i] != dtypes[last[0]] or sum(nbytes[k] for k in [i, *last]) > tail:
            break
        last.insert(0, i)
    buckets, open_buckets = [], {}
    for i in order[: len(order) - len(last)]:
        bucket = open_buckets.get(dtypes[i])
        if bucket is None or sum(nbytes[k] for k in [*bucket, i]) > capacity:
            open_buckets[dtypes[i]] = bucket = []
            buckets.append(bucket)
        bucket.append(i)
    place = {i: k for k, i in enumerate(order)}
    return sorted([*buckets, last], key=lambda bucket: place[bucket[-1]])
