"""Exercise 3, measure: how much of the communication was hidden?

What
    A profiler's trace is a list of intervals (start, end): this kernel ran from 3 to 7. Given those
    of computation and those of communication, say how long each lasted, how much of the
    communication ran beside computation, how much did not, and how long nothing ran.

        window         |--------------------------------|
        computation     ████████████████       ████
        communication           ░░░░░░░░░░░░
        overlapped              ░░░░░░░░                   communication and computation
        exposed                         ░░░░               communication without computation
        idle                                ▁▁▁    ▁▁▁▁▁   neither

Why it matters
    Exposed communication is the cost of data parallelism, and the number that every later step
    tries to lower. PROFILING.md defines it, under that heading, and says how the benchmark measures
    it. Two kernels may run at once on two streams. Adding up the lengths of all
    intervals counts such a moment twice and gives more computation than there was time.

Rules
    - An instant counts once, however many intervals of a list cover it.
    - What lies outside the window does not count. An interval may begin before it.
    - The lists are in no particular order and may be empty.

Check it        ddp-exercise check measure my_measure.py
Then read       ddp_by_hand/tracing/intervals.py and overlap.py there; then look at the timeline
                picture of ddp-benchmark --profile
"""

Interval = tuple[float, float]


def measure(
    computation: list[Interval], communication: list[Interval], window: Interval
) -> dict[str, float]:
    """Returns total times: computation, communication, overlapped, exposed and idle."""
    raise NotImplementedError("sweep over the sorted edges, or cut the window at every edge")
