"""Exercise 4, plan: which gradients are reduced together?

What
    One all-reduce per gradient is one launch and one latency for every bias. So gradients are put
    into buckets, and each bucket is reduced by one call. Write the plan: a pure function, no
    tensors, no ranks. Numbers in, a list of buckets out; a bucket is a list of gradient indices.

        order of arrival   9  8  7  6  5  4  3  2  1  0        backward begins at the last layer
        buckets           [9  8  7][6  5  4  3][2  1][0]
                           launched first     ↑ small: nothing can hide it

Why it matters
    Every rank computes the same plan from the same model, and so they all agree. Collectives match
    by the order of the calls alone.

Rules
    - Every gradient is in exactly one bucket.
    - A bucket holds one dtype, as a flat buffer and a collective do.
    - Inside a bucket, gradients stand in their order of arrival. The buckets stand in the order in
      which they become complete, so the first can be launched early.
    - A bucket holds at most `capacity` bytes. A gradient larger than that has a bucket of its own.
    - Fill buckets as far as that allows: many small ones are many launches.
    - The bucket that is complete last holds at most `tail` bytes, or a single gradient. It is sent
      after the end of backward, and so exposed: it should be small.

Check it        ddp-exercise check plan my_plan.py
Then read       ddp/buckets.py: it halves what is left again and again, instead of one small bucket
"""


def plan_buckets(
    nbytes: list[int], dtypes: list[str], order: list[int], capacity: int, tail: int
) -> list[list[int]]:
    """Divides gradients into buckets.

    Args:
        nbytes: size of each gradient, by index.
        dtypes: type of each gradient, by index, such as "float32".
        order: the indices, first to arrive first. It need not be the reverse of registration.
        capacity: the largest size of a bucket, in bytes.
        tail: the largest size of the bucket that is complete last, in bytes, at most `capacity`.
    """
    raise NotImplementedError("cut `order` into buckets; begin with one dtype and no tail")
